"""A checkpoint's quantised matrices under the names and in the shapes of plain ones."""

from dataclasses import dataclass
from math import prod
from typing import Final

import torch

from worker_svc.errors import ModelError
from worker_svc.model.loader import TensorSource
from worker_svc.model.quantised_config import Quantisation
from worker_svc.model.quantised_layouts import SUFFIXES, Stored, read_matrix, shape_of
from worker_svc.model.quantised_matrix import QuantisedMatrix

_NARROW: Final = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.int32)
"""What a weight never is without scales."""


@dataclass(frozen=True, slots=True)
class Dequantised:
    """What has been dequantised so far."""

    method: str
    """As config.json names it."""

    num_matrices: int
    num_weights: int
    file_bytes: int
    """What the values take in the file; scales are left out."""


class QuantisedWeights:
    """The tensors of a source, with a `weight` in place of each quantised matrix's several.

    What is quantised is told by the tensors that are there.
    """

    __slots__ = ("_matrices", "_num_matrices", "_num_weights", "_plain", "_quantisation", "_source")

    def __init__(self, source: TensorSource, quantisation: Quantisation) -> None:
        """Find the quantised matrices.

        Raises: ModelError if there are none, or one lacks a tensor.
        """
        self._source = source
        self._quantisation = quantisation
        self._num_matrices = self._num_weights = 0
        names = source.names
        self._plain = set(names)
        self._matrices: dict[str, Stored] = {}
        required, optional = SUFFIXES[quantisation.layout]
        marks = [suffix for suffix in required if suffix != "weight"]
        bases = {
            base
            for base, _, suffix in (name.rpartition(".") for name in names)
            if suffix.removesuffix("_inv") in marks
        }
        for base in sorted(bases):
            stored = Stored(source, names, base, quantisation)
            for suffix in required:
                if stored.name(suffix) not in names:
                    raise ModelError(f"tensor {base}.{suffix} is missing")
            self._plain -= {stored.name(suffix) for suffix in (*required, *optional)}
            self._matrices[f"{base}.weight"] = stored
        if not bases:
            raise ModelError(
                f"no tensor is named as quant_method {quantisation.method!r} has them "
                f"({', '.join(marks)})"
            )

    @property
    def names(self) -> frozenset[str]:
        """The tensors there are, by the names that they would have in a plain checkpoint."""
        return frozenset(self._plain.union(self._matrices))

    @property
    def dequantised(self) -> Dequantised:
        """What has been dequantised so far."""
        count, bits = self._num_weights, self._quantisation.bits
        return Dequantised(self._quantisation.method, self._num_matrices, count, count * bits // 8)

    def shape(self, name: str) -> list[int]:
        """Return the shape of one tensor. It must be among `names`.

        Raises: ModelError if the tensors of a matrix have shapes that do not fit.
        """
        if name in self._matrices:
            return shape_of(self._matrices[name])
        return self._source.shape(name)

    def read(self, name: str, dtype: torch.dtype, *parts: range) -> torch.Tensor:
        """Return one tensor or a part of it, a quantised one as what it stands for, in `dtype`.

        Raises: ModelError if the tensors of a matrix are not as they must be.
        """
        if name in self._matrices:
            weight = self.matrix(name, *parts).dequantise(dtype)
            self._num_matrices += 1
            self._num_weights += prod(weight.shape)
            return weight
        tensor = self._source.read(name, dtype, *parts)
        if name.endswith(".weight") and tensor.dtype in _NARROW:
            raise ModelError(f"tensor {name} is {tensor.dtype} and has no scale")
        return tensor

    def quantisation_of(self, name: str) -> Quantisation | None:
        """As `KeptValues.quantisation_of`."""
        return self._quantisation if name in self._matrices else None

    def matrix(self, name: str, *parts: range) -> QuantisedMatrix:
        """As `KeptValues.matrix`. Raises: ModelError as `read` does."""
        stored = self._matrices[name]
        whole = [range(size) for size in shape_of(stored)]
        rows, columns = [*parts, *whole[len(parts) :]]
        return read_matrix(stored, rows, columns)
