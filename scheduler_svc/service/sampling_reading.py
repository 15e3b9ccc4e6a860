"""How to sample: what a request says, then what its model recommends, then the protocol."""

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from pagemill.v1 import generation_pb2
from pagemill.v1.generation_pb2 import BeamSearch
from pagemill.v1.inference_pb2 import GenerateRequest
from scheduler_svc.core.beam_options import BeamOptions, EarlyStopping
from scheduler_svc.core.errors import InvalidRequestError
from scheduler_svc.core.request import Sampling
from scheduler_svc.errors import ConfigError
from scheduler_svc.service.field_bounds import sampling_interval
from scheduler_svc.service.text.model_facts import ModelFacts

_GREEDY_BELOW = 1e-5

_EARLY_STOPPING: Mapping[int, EarlyStopping] = {
    generation_pb2.EARLY_STOPPING_UNSPECIFIED: EarlyStopping.NO,
    generation_pb2.EARLY_STOPPING_FALSE: EarlyStopping.NO,
    generation_pb2.EARLY_STOPPING_TRUE: EarlyStopping.YES,
    generation_pb2.EARLY_STOPPING_NEVER: EarlyStopping.NEVER,
}


def model_sampling(facts: ModelFacts) -> Sampling:
    """Return the sampling of a request that says nothing about it. Its seed means nothing.

    Raises: ConfigError if the model recommends a value outside its bound.
    """
    recommended = facts.sampling
    values = {
        "temperature": recommended.temperature,
        "top_k": recommended.top_k,
        "top_p": recommended.top_p,
        "min_p": recommended.min_p,
        "repetition_penalty": recommended.repetition_penalty,
    }
    for name, value in values.items():
        if value is not None:
            try:
                sampling_interval(name).check(name, value)
            except InvalidRequestError as error:
                raise ConfigError(f"{facts.path}: the model's default {error}") from error
    return _sampling(
        temperature=1.0 if recommended.temperature is None else recommended.temperature,
        top_k=recommended.top_k or 0,
        top_p=1.0 if recommended.top_p is None else recommended.top_p,
        min_p=recommended.min_p or 0.0,
        repetition_penalty=recommended.repetition_penalty or 1.0,
        seed=0,
    )


def read_sampling(
    message: GenerateRequest, default: Sampling, encode: Callable[[str], list[int]]
) -> Sampling:
    """Return the sampling of a request whose fields are within their bounds.

    The seed is drawn here if the request has none, so that the core needs no randomness.
    `encode` makes token ids of a text, and adds none of its own.

    Raises: InvalidRequestError if no token could ever be drawn.
    """
    said, has = message.sampling, message.sampling.HasField
    seed = said.seed if has("seed") else secrets.randbits(64)
    if message.beam.width:
        # The likeliest tokens go on, whatever the model recommends for drawing them.
        return Sampling(temperature=0.0, seed=seed)
    return _sampling(
        temperature=said.temperature if has("temperature") else default.temperature,
        top_k=said.top_k if has("top_k") else default.top_k,
        top_p=said.top_p if has("top_p") else default.top_p,
        min_p=said.min_p if has("min_p") else default.min_p,
        presence_penalty=said.presence_penalty,
        frequency_penalty=said.frequency_penalty,
        repetition_penalty=(
            said.repetition_penalty if has("repetition_penalty") else default.repetition_penalty
        ),
        logit_bias=tuple(sorted(said.logit_bias.items())),
        allowed_token_ids=tuple(sorted(set(said.allowed_token_ids))),
        bad_words=_bad_words(said.bad_words, encode),
        seed=seed,
    )


def _bad_words(
    words: Sequence[str], encode: Callable[[str], list[int]]
) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences of words, as they begin a text and as they follow a space."""
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, f" {word.lstrip()}"):
            if ids := encode(text):
                sequences[tuple(ids)] = None
    return tuple(sequences)


def check_drawable(sampling: Sampling, stop_token_ids: Collection[int]) -> None:
    """Refuse rules that together leave no token to draw from the start.

    `stop_token_ids` are those that may not be drawn before min_tokens, if there is one.

    Raises: InvalidRequestError.
    """
    allowed = set(sampling.allowed_token_ids)
    banned = {*stop_token_ids, *(word[0] for word in sampling.bad_words if len(word) == 1)}
    if allowed and allowed <= banned:
        raise InvalidRequestError(
            "sampling.allowed_token_ids",
            f"sampling.allowed_token_ids has {len(allowed)} ids, all of which bad_words or "
            "min_tokens rule out: one must be left",
        )


def read_beam(message: BeamSearch) -> BeamOptions | None:
    """Return the beam search that a request asks for, its fields being within their bounds."""
    if not message.width:
        return None
    return BeamOptions(
        width=message.width,
        length_penalty=message.length_penalty if message.HasField("length_penalty") else 1.0,
        early_stopping=_EARLY_STOPPING[message.early_stopping],
        num_returned=message.num_returned or 1,
    )


def _sampling(*, temperature: float, top_k: int, **others: Any) -> Sampling:
    """Return a sampling in which what means the same is the same."""
    return Sampling(
        temperature=0.0 if temperature < _GREEDY_BELOW else temperature,
        top_k=max(top_k, 0),
        **others,
    )
