"""Embeddings of a request: their bytes checked, and named by what they hold."""

import asyncio
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from pagemill.v1.generation_pb2 import (
    ELEMENT_TYPE_BFLOAT16,
    ELEMENT_TYPE_FLOAT16,
    ELEMENT_TYPE_FLOAT32,
    ElementType,
)
from pagemill.v1.generation_pb2 import EmbeddingSpan as EmbeddingSpanMessage
from scheduler_svc.core.block_hash import ContentSpan
from scheduler_svc.core.embedded_span import EmbeddedSpan
from scheduler_svc.core.errors import InvalidRequestError, NotServedError, QueueFullError
from scheduler_svc.service.field_bounds import check_name, check_size

MAX_SPANS = 1024
MAX_CONTENT_ID_BYTES = 256

_MAX_INLINE_BYTES = 1 << 18
"""Looking at more takes longer than a thread costs: 1 ms a MiB."""


@dataclass(frozen=True, slots=True)
class _Element:
    """A type of element: its width, and the bits of its exponent, all set if it is not finite."""

    word: np.dtype[np.unsignedinteger]
    exponent: int


_ELEMENTS = {
    ELEMENT_TYPE_FLOAT16: _Element(np.dtype("<u2"), 0x7C00),
    ELEMENT_TYPE_FLOAT32: _Element(np.dtype("<u4"), 0x7F800000),
    ELEMENT_TYPE_BFLOAT16: _Element(np.dtype("<u2"), 0x7F80),
}


async def read_embeddings(
    messages: Sequence[EmbeddingSpanMessage], num_prompt_tokens: int, hidden_size: int | None
) -> tuple[EmbeddedSpan, ...]:
    """Return the spans of a request whose prompt has so many tokens.

    Raises: InvalidRequestError naming field and bound; NotServedError if the model's hidden
        size is in none of its files.
    """
    if not messages:
        return ()
    if hidden_size is None:
        raise NotServedError("embeddings", "embeddings: the model's files tell no hidden size")
    check_size("embeddings", messages, MAX_SPANS, "entries")
    if sum(len(message.embeddings) for message in messages) <= _MAX_INLINE_BYTES:
        return _read(messages, num_prompt_tokens, hidden_size)
    return await asyncio.to_thread(_read, messages, num_prompt_tokens, hidden_size)


def _read(
    messages: Sequence[EmbeddingSpanMessage], num_prompt_tokens: int, hidden_size: int
) -> tuple[EmbeddedSpan, ...]:
    spans: list[EmbeddedSpan] = []
    for index, message in enumerate(messages):
        field = f"embeddings[{index}]"
        span = _read_span(field, message, hidden_size)
        first = spans[-1].content.end if spans else 0
        if span.content.start < first or span.content.end > num_prompt_tokens:
            raise InvalidRequestError(
                f"{field}.offset",
                f"{field}.offset is {span.content.start}, must be in "
                f"[{first}, {num_prompt_tokens - span.content.length}] for {span.content.length} "
                f"embeddings, behind those before and within the prompt's {num_prompt_tokens}",
            )
        spans.append(span)
    return tuple(spans)


def _read_span(field: str, message: EmbeddingSpanMessage, hidden_size: int) -> EmbeddedSpan:
    if not message.content_id:
        raise InvalidRequestError(f"{field}.content_id", f"{field}.content_id is empty")
    check_name(f"{field}.content_id", message.content_id, MAX_CONTENT_ID_BYTES)
    element = _ELEMENTS.get(message.element_type)
    if element is None:
        names = ", ".join(ElementType.Name(each) for each in _ELEMENTS)
        raise InvalidRequestError(
            f"{field}.element_type",
            f"{field}.element_type is {message.element_type}, must be one of {names}",
        )
    values, bytes_of_one = message.embeddings, hidden_size * element.word.itemsize
    if not values or len(values) % bytes_of_one:
        raise InvalidRequestError(
            f"{field}.embeddings",
            f"{field}.embeddings has {len(values)} bytes, must be a multiple of {bytes_of_one}, "
            f"{hidden_size} elements of {element.word.itemsize} bytes, and not empty",
        )
    bits = np.frombuffer(values, dtype=element.word)
    wrong = (bits & element.exponent) == element.exponent
    if wrong.any():
        raise InvalidRequestError(
            f"{field}.embeddings",
            f"{field}.embeddings has an element {int(np.argmax(wrong))} that is not finite",
        )
    # The id is the client's word, the hash is what it sent: both must be equal for a hit.
    digest = hashlib.sha256(values).hexdigest()[:32]
    content_id = f"{message.content_id}@{message.element_type}:{digest}"
    content = ContentSpan(content_id, message.offset, len(values) // bytes_of_one)
    return EmbeddedSpan(content, values, message.element_type)


class EmbeddingRoom:
    """Bytes of embeddings that live requests hold together, within a bound."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0

    @contextmanager
    def holding(self, spans: Sequence[EmbeddedSpan]) -> Iterator[None]:
        """Count a request's embeddings while the block lasts.

        Raises: QueueFullError if there is no room; InvalidRequestError if there never is.
        """
        num_bytes = sum(len(span.values) for span in spans)
        if num_bytes > self._max_bytes:
            raise InvalidRequestError(
                "embeddings",
                f"embeddings has {num_bytes} bytes, must have at most {self._max_bytes}: "
                "see max_embedding_bytes",
            )
        if num_bytes and self.num_bytes + num_bytes > self._max_bytes:
            raise QueueFullError(
                f"live requests hold {self.num_bytes} bytes of embeddings, with the {num_bytes} "
                f"of this one they would be more than {self._max_bytes}"
            )
        self.num_bytes += num_bytes
        try:
            yield
        finally:
            self.num_bytes -= num_bytes
