"""How to sample: what a request says, then what its model recommends, then the protocol."""

import secrets
from collections.abc import Mapping

from pagemill.v1 import generation_pb2
from pagemill.v1.generation_pb2 import BeamSearch
from pagemill.v1.inference_pb2 import GenerateRequest
from scheduler_svc.core.errors import InvalidRequestError
from scheduler_svc.core.request import BeamOptions, EarlyStopping, Sampling
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
        seed=0,
    )


def read_sampling(message: GenerateRequest, default: Sampling) -> Sampling:
    """Return the sampling of a request whose fields are within their bounds.

    The seed is drawn here if the request has none, so that the core needs no randomness.
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
        seed=seed,
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


def _sampling(*, temperature: float, top_k: int, top_p: float, min_p: float, seed: int) -> Sampling:
    return Sampling(
        temperature=0.0 if temperature < _GREEDY_BELOW else temperature,
        top_k=max(top_k, 0),
        top_p=top_p,
        min_p=min_p,
        seed=seed,
    )
