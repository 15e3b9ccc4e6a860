"""A model's operations on a CPU with weights of 4 or 8 bits, rounded when they are loaded."""

from collections.abc import Sequence

import torch

from kernels.activation import Activation
from kernels.quantised_linear import QuantisedLinear, quantise
from worker_svc.model.kept_values import NotKept, keep, stacked
from worker_svc.model.native_operations import NativeOperations
from worker_svc.model.operations import Linear
from worker_svc.model.quantised_config import Quantisation
from worker_svc.model.quantised_matrix import QuantisedMatrix


class QuantisedOperations(NativeOperations):
    """As `NativeOperations`, but for linear layers. Embeddings stay; the LM head has 8 bits.

    So has it in 4-bit files: with 4 its rounding would be most of the logits' error. A group of a
    Q4_1 file is found again, value for value, since it has both ends of its range; so is one of
    Q8_0. Values that an AWQ, GPTQ or compressed-tensors checkpoint has are kept (`KeepsValues`).
    Other weights are off by half a step.
    """

    __slots__ = ("_bits", "_dtype")

    def __init__(self, bits: int, dtype: torch.dtype) -> None:
        """Take weights of `bits` (4 or 8) for hidden states of `dtype`."""
        super().__init__()
        self._bits = bits
        self._dtype = dtype

    @property
    def weight_dtype(self) -> torch.dtype:
        """Float32, lest values leave their grid on the way."""
        return torch.float32

    def keeps(self, known: Quantisation) -> bool:
        """Of integers, those of as many bits or fewer."""
        return not known.is_float and known.bits <= self._bits

    def kept_linear(
        self,
        matrices: Sequence[QuantisedMatrix],
        known: Quantisation,
        bias: torch.Tensor | None,
        device: torch.device,
        gate: Activation | None = None,
    ) -> QuantisedLinear | NotKept:
        """Lay the values out, in a copy."""
        found = [keep(matrix, known.bits) for matrix in matrices]
        parts = [part for part in found if part is not None]
        if len(parts) < len(found):
            return NotKept("inputs that share a scale are not in whole groups of 32")
        return QuantisedLinear(
            stacked(parts), bias, dtype=self._dtype, gate=gate, memory=self._memory
        )

    def linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, is_head: bool = False
    ) -> Linear:
        """Round the weight and lay it out, in a copy."""
        rounded = quantise(weight, 8 if is_head else self._bits)
        return QuantisedLinear(rounded, bias, dtype=self._dtype, memory=self._memory)

    def gated_linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation
    ) -> Linear:
        """As `linear`, of both matrices together."""
        rounded = quantise(weight, self._bits)
        return QuantisedLinear(
            rounded, bias, dtype=self._dtype, gate=activation, memory=self._memory
        )
