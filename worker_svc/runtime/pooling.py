"""Pooled hidden states: one vector for a whole row, in place of a token."""

import numpy as np
import torch

from worker_svc.runtime.rows import Rows
from worker_svc.runtime.step_plan import Int64Array, Pooling, RowVector

_NOT_FINITE = "the model's hidden states are not finite"
_NOT_ALL = "the mean over all tokens is asked for, but the row does not run all of them"


class Pooler:
    """Pools the hidden states of rows that ask for it, over all the steps that these need."""

    __slots__ = ("_sums",)

    def __init__(self) -> None:
        # [E] fp32 of each row whose mean has begun; begun anew where a row runs from its start.
        self._sums: dict[int, torch.Tensor] = {}

    def pool(self, hidden: torch.Tensor, rows: Rows, running: Int64Array) -> tuple[RowVector, ...]:
        """Return the vectors of pooled rows that end here. A row that fails is noted in `rows`.

        Shapes: hidden [T, E], normalised, of the tokens of the `running` rows, row after row.

        Numerics: sums in fp32, chunk by chunk.
        """
        if not rows.sampling.asking:
            return ()
        kinds = rows.sampling.pooling[running]
        places = np.flatnonzero(kinds)
        if not len(places):
            return ()
        counts = rows.num_new_tokens[running]
        begins = np.cumsum(counts) - counts
        vectors = []
        for place in places.tolist():
            row = int(running[place])
            states = hidden[int(begins[place]) : int(begins[place]) + int(counts[place])]
            vector = self._add(states, rows, row, Pooling(int(kinds[place])))
            if vector is None:
                continue
            if bool(torch.isfinite(vector).all()):
                vectors.append(RowVector(row, vector.cpu().numpy()))
            else:
                rows.failures[row] = _NOT_FINITE
        return tuple(vectors)

    def _add(
        self, states: torch.Tensor, rows: Rows, row: int, kind: Pooling
    ) -> torch.Tensor | None:
        """Take a chunk's states [C, E]; return the row's vector [E] if it was the last."""
        first, total = int(rows.num_computed_tokens[row]), int(rows.num_tokens[row])
        is_last = first + len(states) == total
        if kind is Pooling.LAST:
            return states[-1].to(torch.float32, copy=True) if is_last else None
        chunk = states.float().sum(dim=0)
        if first:
            before = self._sums.pop(row, None)
            if before is None:
                rows.failures[row] = _NOT_ALL
                return None
            chunk = chunk + before
        if is_last:
            return chunk / total
        self._sums[row] = chunk
        return None
