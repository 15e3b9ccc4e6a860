"""Embeddings: what is asked and what comes back; and their messages."""

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pagemill.client.errors import InternalError, InvalidArgumentError
from pagemill.client.events import Usage
from pagemill.client.one_field import filled, one_field
from pagemill.v1 import generation_pb2, inference_pb2

Pooling = Literal["last", "mean"]
"""Which hidden states make a vector: the last token's, or the mean over all."""

_POOLING: dict[str, inference_pb2.Pooling.ValueType] = {
    "last": inference_pb2.POOLING_LAST,
    "mean": inference_pb2.POOLING_MEAN,
}


@dataclass(frozen=True, slots=True)
class Embeddings:
    """The vectors of some inputs."""

    vectors: tuple["array[float]", ...]
    """One per input, in order: float32, as long as the model's hidden states."""

    usage: Usage
    """Tokens of all inputs."""


def embed_request(
    inputs: Sequence[str] | Sequence[Sequence[int]],
    *,
    pooling: str,
    normalize: bool,
    model: str,
    request_id: str,
) -> inference_pb2.EmbedRequest:
    """Return the message that asks for the vectors of texts, or of lists of token ids.

    Raises: InvalidArgumentError for inputs that no message can hold, and for no pooling.
    """
    if pooling not in _POOLING:
        raise InvalidArgumentError(
            f"pooling is {pooling!r}, must be one of {', '.join(_POOLING)}", field="pooling"
        )
    if isinstance(inputs, str):
        raise InvalidArgumentError("inputs is one text, must be a list of them", field="inputs")
    request = filled(
        inference_pb2.EmbedRequest,
        request_id=request_id,
        model=model,
        pooling=_POOLING[pooling],
        normalize=normalize,
    )
    texts = [each for each in inputs if isinstance(each, str)]
    try:
        if len(texts) == len(inputs):
            request.texts.texts.extend(texts)
            request.texts.SetInParent()
        elif texts:
            raise InvalidArgumentError(
                "inputs has texts and token ids, must have one kind", field="inputs"
            )
        else:
            request.tokens.inputs.extend(
                one_field(generation_pb2.TokenIds, "ids", ids, f"inputs[{number}]")
                for number, ids in enumerate(inputs)
            )
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"inputs cannot be sent: {error}", field="inputs") from error
    return request


def embeddings(message: inference_pb2.EmbedResponse) -> Embeddings:
    """Return what a message tells. Raises: InternalError for a vector that is cut."""
    vectors = []
    for vector in message.vectors:
        if len(vector.values) % 4:
            raise InternalError(f"a vector has {len(vector.values)} bytes, must be float32 words")
        vectors.append(_float32s(vector.values))
    usage = message.usage
    return Embeddings(
        tuple(vectors),
        Usage(
            usage.prompt_tokens,
            usage.completion_tokens,
            usage.cached_tokens,
            usage.recomputed_tokens,
        ),
    )


def _float32s(little_endian: bytes) -> "array[float]":
    values = array("f", little_endian)
    if sys.byteorder == "big":
        values.byteswap()
    return values
