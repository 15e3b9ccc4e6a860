"""A linear layer on a CPU that adds each token's adapter (kernels/cpu/adapted.h)."""

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kernels import cpu_threads
from kernels.cpu_build import native_code
from kernels.low_rank import LayerShape, PackedAdapter
from kernels.native_linear import NativeLinear, native_linear
from kernels.packed_linear import (
    PROTOTYPE,
    LinearStructure,
    PackedLinear,
    check_rows_of,
    empty_or,
)
from kernels.quantised_linear import QuantisedLinear

WRONG_NUMBER_OF_TOKENS = 3
"""What native code returns where adapters were told of another number of tokens."""


class _Tokens(ctypes.Structure):
    _fields_ = (
        ("adapters", ctypes.c_void_p),
        ("adapter_of", ctypes.c_void_p),
        ("of_read", ctypes.c_void_p),
        ("T", ctypes.c_int64),
        ("num_adapters", ctypes.c_int64),
    )


class AdaptedTokens:
    """Which adapter each token of the step in hand has: the same for all layers of a model."""

    __slots__ = ("_kept", "_structure")

    def __init__(self) -> None:
        self._structure = _Tokens()
        self._kept: tuple[object, ...] = ()

    @property
    def address(self) -> int:
        """Of what native code reads."""
        return ctypes.addressof(self._structure)

    def begin(self, adapters: Sequence[PackedAdapter], adapter_of: npt.NDArray[np.int32]) -> None:
        """Let layers add adapters until the next call; none, if there are none.

        Adapters are kept as long, whoever else drops them.

        Shapes: adapter_of [T], a place in `adapters` for each token; -1: none.
        Raises: ValueError if there is no such place.
        """
        found = self._structure
        found.num_adapters, self._kept = 0, ()
        if not adapters:
            return
        if len(adapter_of) and not -1 <= adapter_of.min() <= adapter_of.max() < len(adapters):
            raise ValueError(
                f"adapters go from {adapter_of.min()} to {adapter_of.max()}, must from -1 to "
                f"{len(adapters) - 1}"
            )
        places = np.ascontiguousarray(adapter_of, dtype=np.int32)
        read = np.empty_like(places)
        addresses = (ctypes.c_void_p * len(adapters))(*(each.address for each in adapters))
        found.adapters = ctypes.addressof(addresses)
        found.adapter_of, found.of_read = places.ctypes.data, read.ctypes.data
        found.T, found.num_adapters = len(places), len(adapters)
        self._kept = (tuple(adapters), places, read, addresses)


class _Structure(ctypes.Structure):
    """The twin of `AdaptedLinear` in kernels/cpu/adapted.h."""

    _fields_ = (
        ("plain", ctypes.c_void_p),
        ("is_quantised", ctypes.c_int64),
        ("tokens", ctypes.c_void_p),
        ("number", ctypes.c_int64),
    )


class AdaptedLinear:
    """A packed linear layer, and what the adapters of the step in hand add to it.

    Of a gated layer they change gate and up, before these are multiplied.

    Numerics: x @ a.T, its product with b, and their sum with the layer's, in fp32; rounded once.
        A quantised layer's inputs are rounded for its own weight alone.
    Invariant: a token's result depends on the token and its adapter alone; without an adapter it
        is bitwise the layer's.
    Cost: without adapters in the step, a call of the layer. Of each in use a and b are read once.
    """

    __slots__ = ("_arguments", "_call", "_layer", "_native", "shape", "tokens")

    def __init__(
        self,
        layer: PackedLinear | QuantisedLinear,
        tokens: AdaptedTokens,
        number: int,
        *,
        code: ctypes.CDLL | None = None,
    ) -> None:
        """Take a layer, and the number by which packed adapters know it.

        Raises: ValueError if it has no native code.
        """
        code, native = code or native_code(), layer.native
        if code is None or native is None:
            raise ValueError("the layer has no native code")
        self._layer = layer
        self.tokens = tokens
        """Of its model."""
        is_quantised = isinstance(layer, QuantisedLinear)
        self._arguments = _Structure(native.layer, is_quantised, tokens.address, number)
        self._call = PROTOTYPE(("pagemill_adapted", code))
        self._native = native
        # Of a quantised layer it is the first field.
        plain = LinearStructure.from_address(native.layer)
        num_rows = plain.O * (2 if plain.gate else 1)
        self.shape = LayerShape(native.layer, native.num_inputs, num_rows, native.dtype)

    @property
    def native(self) -> NativeLinear | None:
        """How native code calls it."""
        plain = self._native
        return native_linear(
            self._call, self._arguments, plain.num_inputs, plain.num_outputs, plain.dtype
        )

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the product. Shapes: x [T, I], out and returned [T, O], of the layer's dtype.

        Raises: ValueError if `x` or `out` is not so, its rows are not contiguous, or adapters were
            told of another number of tokens; MemoryError.
        """
        check_rows_of("x", x, self._native.num_inputs, self._native.dtype)
        out = empty_or(out, x, self._native.num_outputs)
        status = self._call(
            ctypes.addressof(self._arguments), x.data_ptr(), x.stride(0), len(x), out.data_ptr(),
            out.stride(0), cpu_threads.num_threads(),
        )  # fmt: skip
        check_status(status, len(x))
        return out


def check_status(status: int, num_tokens: int) -> None:
    """Raises: ValueError or MemoryError if native code could not run so many tokens."""
    if status == WRONG_NUMBER_OF_TOKENS:
        raise ValueError(f"{num_tokens} tokens; adapters were told of another number of them")
    if status:
        raise MemoryError(f"no memory for {num_tokens} tokens")
