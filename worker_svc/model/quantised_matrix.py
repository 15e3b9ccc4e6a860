"""One matrix of few bits: its values, and what scales them."""

from dataclasses import dataclass
from typing import Final

import torch

_SLAB_ELEMENTS: Final = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class QuantisedMatrix:
    """A weight [o, i] is (value - zero) * scale, whose scale is at [row_of[o], column_of[i]]."""

    values: torch.Tensor
    """[O, I] uint8, or fp8."""

    scales: torch.Tensor
    """[R, C] fp32"""

    zeros: torch.Tensor | None
    """As scales; None: 0."""

    row_of: torch.Tensor
    """[O] int64, below R"""

    column_of: torch.Tensor
    """[I] int64, below C"""

    def dequantise(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weights [O, I].

        Numerics: in fp32, where differences are exact, then rounded to `dtype`.
        """
        rows, columns = self.values.shape
        out = torch.empty((rows, columns), dtype=dtype)
        step = max(1, _SLAB_ELEMENTS // max(1, columns))
        for first in range(0, rows, step):
            slab = slice(first, first + step)
            weight = self.values[slab].float()
            if self.zeros is not None:
                weight -= self._spread(self.zeros, slab)
            out[slab] = weight.mul_(self._spread(self.scales, slab))
        return out

    def _spread(self, grid: torch.Tensor, slab: slice) -> torch.Tensor:
        """Return what is at each weight's place. Shape: [rows of the slab, I or 1]."""
        rows = grid.index_select(0, self.row_of[slab])
        return rows if grid.shape[1] == 1 else rows.index_select(1, self.column_of)
