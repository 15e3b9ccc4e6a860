"""A model's operations on a CPU with weights of 4 or 8 bits, rounded when they are loaded."""

import torch

from kernels.quantised_linear import QuantisedLinear, quantise
from worker_svc.model.native_operations import NativeOperations
from worker_svc.model.operations import Linear


class QuantisedOperations(NativeOperations):
    """As `NativeOperations`, but for linear layers, the LM head included. Embeddings stay.

    A group of a Q4_1 file is found again, value for value: it has both ends of its range. So is
    one of Q8_0. Other weights are off by half a step.
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

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """Round the weight and lay it out, in a copy."""
        rounded = quantise(weight, self._bits)
        return QuantisedLinear(rounded, bias, dtype=self._dtype, memory=self._memory)
