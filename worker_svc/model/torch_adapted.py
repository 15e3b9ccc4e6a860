"""What adapters add to linear layers that have no native code: products of torch, on any device."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from kernels.activation import Activation
from kernels.low_rank import LowRankPart
from worker_svc.model.operations import Linear, Operations

_FEW_TOKENS = 64
"""Up to so many, one product with zeros in it costs less than one for each matrix of a layer."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerChange:
    """What an adapter adds to one layer: all its matrices there, in one pair."""

    a: torch.Tensor
    """[in, sum of ranks]"""

    b: torch.Tensor
    """[sum of ranks, out], 0 where a matrix does not reach."""

    parts: tuple[tuple[slice, slice], ...]
    """Ranks and outputs of each matrix."""

    @property
    def num_bytes(self) -> int:
        """What it takes."""
        return self.a.nbytes + self.b.nbytes

    def add(self, x: torch.Tensor, places: torch.Tensor | None, y: torch.Tensor) -> None:
        """Add to the outputs of some tokens. Shapes: x [T, in], places [P], y [T, out].

        Numerics: both products in the type of `a`, rounded once to y's.
        """
        inner = (x if places is None else x[places]).to(self.a.dtype) @ self.a
        if len(inner) <= _FEW_TOKENS:
            _add_rows(y, places, inner @ self.b)
            return
        for ranks, rows in self.parts:
            _add_rows(y[:, rows], places, inner[:, ranks] @ self.b[ranks, rows])


def _add_rows(y: torch.Tensor, places: torch.Tensor | None, added: torch.Tensor) -> None:
    added = added.to(y.dtype)
    if places is None:
        y += added
    else:
        y.index_add_(0, places, added)


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """The tokens of the step in hand that one adapter changes."""

    layers: Mapping[int, LayerChange]
    """By the number of the layer."""

    places: torch.Tensor | None
    """[P] int64. None: all tokens."""


def adapted(linear: Linear, number: int, runs: Callable[[], Sequence[Run]]) -> Linear:
    """Return a layer that adds to this one what the step's runs have for its number."""

    def added(x: torch.Tensor) -> torch.Tensor:
        y = linear(x)
        for run in runs():
            change = run.layers.get(number)
            if change is not None:
                change.add(x, run.places, y)
        return y

    return added


def fuse(
    parts: Sequence[LowRankPart], num_rows: int, dtype: torch.dtype, device: torch.device
) -> LayerChange:
    """Return what an adapter adds to a layer of so many rows."""
    a = torch.cat([part.a for part in parts]).T.contiguous()
    b = torch.zeros(a.shape[1], num_rows)
    found, first = [], 0
    for part in parts:
        last = first + len(part.a)
        place = slice(first, last), slice(part.first_row, part.first_row + len(part.b))
        b[place] = part.b.T
        found.append(place)
        first = last
    return LayerChange(a.to(device, dtype), b.to(device, dtype), tuple(found))


@dataclass(frozen=True, slots=True, eq=False)
class Gated:
    """activation(gate) * up of a linear layer that gives [gate, up], between which adapters add."""

    linear: Linear
    operations: Operations
    activation: Activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product. Shapes: x [T, in], returns [T, I]."""
        gate_up = self.linear(x)
        if self.activation is Activation.GELU:
            return self.operations.gelu_and_mul(gate_up)
        return self.operations.silu_and_mul(gate_up)
