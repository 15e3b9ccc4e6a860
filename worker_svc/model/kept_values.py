"""Weights of few bits as a file has them, for linear layers that multiply by such."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from kernels.activation import Activation
from kernels.quantised_linear import QuantisedWeight
from kernels.reference_quantised import GROUP
from worker_svc.model.quantised_config import Quantisation
from worker_svc.model.quantised_matrix import QuantisedMatrix


@runtime_checkable
class KeptValues(Protocol):
    """A source of tensors, some of which are of few bits."""

    def quantisation_of(self, name: str) -> Quantisation | None:
        """Return how a tensor is quantised. None: it is not."""
        ...

    def matrix(self, name: str, *parts: range) -> QuantisedMatrix:
        """Return one that is, or a part, value for value."""
        ...


class SizedLinear(Protocol):
    """A linear layer that says what its weight takes."""

    @property
    def num_bytes(self) -> int:
        """Of the weight as it is multiplied."""
        ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product. Shapes: x [T, in], returns [T, out]."""
        ...


class NotKept(NamedTuple):
    """Values that no layer multiplies as they are."""

    reason: str


@runtime_checkable
class KeepsValues(Protocol):
    """Operations with linear layers over weights of few bits."""

    def keeps(self, known: Quantisation) -> bool:
        """Return whether such weights may stay as they are: if not, they are not even read so."""
        ...

    def kept_linear(
        self,
        matrices: Sequence[QuantisedMatrix],
        known: Quantisation,
        bias: torch.Tensor | None,
        device: torch.device,
        gate: Activation | None = None,
    ) -> SizedLinear | NotKept:
        """Return a linear layer, or a gated one, of matrices above one another."""
        ...


@dataclass(frozen=True, slots=True)
class Kept:
    """What has been kept so far."""

    num_matrices: int
    num_weights: int
    num_bytes: int
    """Scales and zero points included."""

    refused: Mapping[str, int]
    """Why matrices were dequantised though their like is kept, and how many."""


def keep(matrix: QuantisedMatrix, bits: int) -> QuantisedWeight | None:
    """Return a matrix of unsigned values below 2 ** bits in groups of 32, value for value.

    None if its values are fp8, or inputs of one group have different scales.
    """
    firsts = matrix.column_of[::GROUP]
    spread = firsts.repeat_interleave(GROUP)[: len(matrix.column_of)]
    if matrix.zeros is None or not torch.equal(spread, matrix.column_of):
        return None
    scales, zeros = (
        grid.index_select(0, matrix.row_of).index_select(1, firsts)
        for grid in (matrix.scales, matrix.zeros)
    )
    zero = int(zeros.flatten()[0])
    if bool((zeros == zero).all()) and 0 <= zero < 1 << bits:
        return QuantisedWeight(bits, matrix.values, scales, zero_point=zero)
    return QuantisedWeight(bits, matrix.values, scales, -zeros * scales)


def stacked(parts: Sequence[QuantisedWeight]) -> QuantisedWeight:
    """Return matrices of equal bits and columns above one another."""
    values = torch.cat([part.values for part in parts])
    scales = torch.cat([part.scales for part in parts])
    bits, zero = parts[0].bits, parts[0].zero_point
    if all(part.minimums is None and part.zero_point == zero for part in parts):
        return QuantisedWeight(bits, values, scales, zero_point=zero)
    minimums = torch.cat([_minimums(part) for part in parts])
    return QuantisedWeight(bits, values, scales, minimums)


def _minimums(weight: QuantisedWeight) -> torch.Tensor:
    return -weight.zero_point * weight.scales if weight.minimums is None else weight.minimums
