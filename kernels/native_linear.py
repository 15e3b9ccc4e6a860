"""A linear layer as other native code calls it."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch


@dataclass(frozen=True, slots=True)
class NativeLinear:
    """A linear layer as native code calls it: what `AnyLinear` holds."""

    function: int
    """Address of a function (layer, x, x_stride, T, out, out_stride, num_threads)."""

    layer: int
    """Address of its first argument, which the layer's owner keeps."""

    num_inputs: int
    num_outputs: int
    dtype: torch.dtype
    """Of inputs and outputs."""


class AnyLinear(ctypes.Structure):
    """The twin of `AnyLinear` in kernels/cpu/any_linear.h."""

    _fields_ = (("call", ctypes.c_void_p), ("layer", ctypes.c_void_p), ("O", ctypes.c_int64))

    @classmethod
    def of(cls, linear: NativeLinear | None) -> "AnyLinear":
        """Return how native code calls a layer; nothing that it can call, of None."""
        return cls() if linear is None else cls(linear.function, linear.layer, linear.num_outputs)


@runtime_checkable
class HasNativeLinear(Protocol):
    """A linear layer that native code can call."""

    @property
    def native(self) -> NativeLinear | None:
        """How. None: it cannot."""
        ...


def native_linear(
    call: Callable[..., int] | None,
    arguments: ctypes.Structure,
    num_inputs: int,
    num_outputs: int,
    dtype: torch.dtype,
) -> NativeLinear | None:
    """Return how native code makes a call that Python makes with a function of ctypes, if any."""
    if call is None:
        return None
    # What ctypes calls is a pointer to a function, which its types do not say.
    address = ctypes.cast(call, ctypes.c_void_p).value  # type: ignore[arg-type]
    layer = ctypes.addressof(arguments)
    return NativeLinear(address or 0, layer, num_inputs, num_outputs, dtype)


def native_of(linear: object) -> NativeLinear | None:
    """Return how native code calls a layer. None: it cannot."""
    return linear.native if isinstance(linear, HasNativeLinear) else None
