"""What an adapter adds to linear layers, packed for native code (kernels/cpu/low_rank.h)."""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kernels.weight_memory import WeightMemory


@dataclass(frozen=True, slots=True, eq=False)
class LowRankPart:
    """What an adapter adds to some rows of a layer's weight: b @ a."""

    first_row: int
    a: torch.Tensor
    """[r, I]"""

    b: torch.Tensor
    """[rows, r]"""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What packing needs to know of a linear layer."""

    structure: int
    """Address of its `Linear` (kernels/cpu/linear.h), which its owner keeps."""

    num_inputs: int
    num_rows: int
    """Of its weight: of a gated layer twice its outputs."""

    dtype: torch.dtype


class LowRankStructure(ctypes.Structure):
    """The twin of `LowRank` in kernels/cpu/low_rank.h."""

    _fields_ = (
        ("a", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        ("reach", ctypes.c_void_p),
        ("ranks", ctypes.c_int64),
    )


class _Part(ctypes.Structure):
    """The twin of `LowRankPart` in kernels/cpu/low_rank.h."""

    _fields_ = (
        ("a", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        ("first_row", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("rank", ctypes.c_int64),
    )


class PackedAdapter:
    """What one adapter adds to the layers of a model, in the layers' dtype.

    Cost: a copy of its matrices, ranks of a layer rounded up to the vectors of a panel.
    """

    __slots__ = ("_memory", "_structures")

    def __init__(
        self,
        shapes: Mapping[int, LayerShape],
        parts: Mapping[int, Sequence[LowRankPart]],
        code: ctypes.CDLL,
    ) -> None:
        """Pack what is added to some of the layers, both by number, in memory of its own.

        Raises: ValueError if a part does not fit its layer, overlaps another, or is not finite in
            the layer's dtype; MemoryError.
        """
        self._structures = (LowRankStructure * (1 + max(shapes)))()
        packed = {
            number: _taken(shapes[number], sorted(each, key=lambda part: part.first_row))
            for number, each in parts.items()
        }
        sizes = {
            number: _num_bytes(shapes[number], _structures_of(each), code)
            for number, each in packed.items()
        }
        self._memory = WeightMemory(0).allocate(sum(sizes.values()))
        at = self._memory.data_ptr()
        for number, each in packed.items():
            structures = _structures_of(each)
            status = code.pagemill_low_rank_pack(
                ctypes.c_void_p(shapes[number].structure),
                structures,
                ctypes.c_int64(len(each)),
                ctypes.c_void_p(at),
                ctypes.byref(self._structures[number]),
            )
            if status:
                raise MemoryError(f"no memory to pack what is added to layer {number}")
            at += sizes[number]

    @property
    def num_bytes(self) -> int:
        """What it takes."""
        return self._memory.nbytes

    @property
    def address(self) -> int:
        """Of what is added, layer by layer."""
        return ctypes.addressof(self._structures)


def packed_bytes(
    shape: LayerShape, sizes: Sequence[tuple[int, int]], rank: int, code: ctypes.CDLL
) -> int:
    """Return what parts of a rank take: never less than those of a smaller rank, or fewer of them.

    `sizes`: the first row and the rows of each part, in order.
    """
    structures = (_Part * len(sizes))(*(_Part(None, None, *size, rank) for size in sizes))
    return _num_bytes(shape, structures, code)


def _num_bytes(shape: LayerShape, structures: "ctypes.Array[_Part]", code: ctypes.CDLL) -> int:
    code.pagemill_low_rank_bytes.restype = ctypes.c_int64
    found: int = code.pagemill_low_rank_bytes(
        ctypes.c_void_p(shape.structure), structures, ctypes.c_int64(len(structures))
    )
    return found


def _structures_of(parts: Sequence[LowRankPart]) -> "ctypes.Array[_Part]":
    return (_Part * len(parts))(
        *(
            _Part(part.a.data_ptr(), part.b.data_ptr(), part.first_row, len(part.b), len(part.a))
            for part in parts
        )
    )


def _taken(shape: LayerShape, parts: Sequence[LowRankPart]) -> list[LowRankPart]:
    """Return parts in the layer's dtype, contiguous."""
    taken, next_row = [], 0
    for part in parts:
        rank, last = len(part.a), part.first_row + len(part.b)
        if part.a.shape != (rank, shape.num_inputs) or part.b.shape != (len(part.b), rank):
            raise ValueError(
                f"a is {list(part.a.shape)}, b {list(part.b.shape)}; must be "
                f"[r, {shape.num_inputs}] and [rows, r]"
            )
        if rank == 0 or not next_row <= part.first_row < last <= shape.num_rows:
            raise ValueError(
                f"a part of rank {rank} has rows {part.first_row} to {last}, must have some of "
                f"{next_row} to {shape.num_rows}"
            )
        next_row = last
        a, b = part.a.to(shape.dtype).contiguous(), part.b.to(shape.dtype).contiguous()
        if not all(bool(torch.isfinite(half).all()) for half in (a, b)):
            raise ValueError(f"not all is finite in {shape.dtype}")
        taken.append(LowRankPart(part.first_row, a, b))
    return taken
