"""Weights of few bits as a file has them, for linear layers that multiply by such."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from kernels.activation import Activation
from kernels.quantised_linear import QuantisedLinear, QuantisedWeight
from kernels.reference_quantised import GROUP
from worker_svc.model.quantised_matrix import QuantisedMatrix


@runtime_checkable
class KeptValues(Protocol):
    """A source of tensors, some of which are of few bits."""

    def kept(self, name: str, bits: int, *parts: range) -> QuantisedWeight | None:
        """Return one tensor, or a part, value for value.

        None if it is plain, or has values of more than `bits`, or scales that do not fit.
        """
        ...


@runtime_checkable
class KeepsValues(Protocol):
    """Operations with linear layers over weights of few bits."""

    @property
    def kept_bits(self) -> int:
        """Weights of as many bits, or of fewer, stay as they are."""
        ...

    def kept_linear(
        self, weight: QuantisedWeight, bias: torch.Tensor | None, gate: Activation | None = None
    ) -> QuantisedLinear:
        """Return a linear layer, or a gated one, over values that are kept."""
        ...


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
