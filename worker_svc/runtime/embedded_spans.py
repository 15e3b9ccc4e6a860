"""Embeddings that stand in place of tokens, kept for each row until they are computed."""

from typing import Final

import numpy as np
import torch

from worker_svc.model.operations import Embedded
from worker_svc.runtime.step_plan import AdmittedRow, EmbeddedSpan, Int32Array, Int64Array

_DTYPES: Final = {
    "float16": torch.float16,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
}


class EmbeddedSpans:
    """Per row, spans of vectors. A step takes the part it runs; what is computed is dropped.

    A row never goes back to tokens it has computed, but by being admitted anew, in full.
    """

    __slots__ = ("_device", "_dtype", "_hidden_size", "_spans")

    def __init__(
        self,
        hidden_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        """Keep vectors of the model's type, on its device. A `hidden_size` of 0 takes none."""
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._device = device
        self._spans: dict[int, list[tuple[int, torch.Tensor]]] = {}

    def replace(self, row: int, entry: AdmittedRow) -> str | None:
        """Give a row its spans, and no others. Returns why the row cannot run, if it cannot."""
        self._spans.pop(row, None)
        if not entry.embeddings:
            return None
        spans = []
        for span in entry.embeddings:
            vectors = self._read(span)
            if vectors is None or not 0 <= span.offset <= len(entry.tokens) - len(vectors):
                return (
                    f"embeddings at {span.offset} have {len(span.values)} bytes of {span.dtype}, "
                    f"must be vectors of {self._hidden_size} for some of {len(entry.tokens)} tokens"
                )
            spans.append((span.offset, vectors))
        self._spans[row] = spans
        return None

    def _read(self, span: EmbeddedSpan) -> torch.Tensor | None:
        """Return the vectors [n, E], or None if the bytes are none."""
        dtype = _DTYPES.get(span.dtype)
        if dtype is None or not self._hidden_size or not span.values:
            return None
        if len(span.values) % (self._hidden_size * dtype.itemsize):
            return None
        # A copy, since torch wants memory that may be written.
        raw = torch.frombuffer(bytearray(span.values), dtype=dtype)
        return raw.view(-1, self._hidden_size).to(self._device, self._dtype)

    def forget(self, rows: Int32Array | Int64Array) -> None:
        """Drop what rows have."""
        if self._spans:
            for row in rows.tolist():
                self._spans.pop(row, None)

    @property
    def are_any(self) -> bool:
        """Whether some row has any left."""
        return bool(self._spans)

    def are_of(self, rows: Int64Array) -> bool:
        """Return whether one of these rows has any left."""
        return bool(self._spans) and not self._spans.keys().isdisjoint(rows.tolist())

    def of_step(self, rows: Int64Array, starts: Int64Array, ends: Int64Array) -> Embedded | None:
        """Return the vectors of the tokens that rows run, and drop what is behind them.

        Shapes: rows, starts, ends [R]: positions [start, end) of each run, in order.
        """
        if not self._spans:
            return None
        places: list[Int64Array] = []
        vectors: list[torch.Tensor] = []
        first_place = 0
        for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
            spans = self._spans.get(row, [])
            for offset, each in spans:
                first, last = max(start, offset), min(end, offset + len(each))
                if first < last:
                    place = first_place + first - start
                    places.append(np.arange(place, place + last - first))
                    vectors.append(each[first - offset : last - offset])
            left = [(offset, each) for offset, each in spans if offset + len(each) > end]
            if left:
                self._spans[row] = left
            elif spans:
                del self._spans[row]
            first_place += end - start
        if not places:
            return None
        where = torch.from_numpy(np.concatenate(places))
        return Embedded(where.to(self._device), torch.cat(vectors))
