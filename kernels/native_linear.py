"""A linear layer as other native code calls it."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class NativeLinear:
    """A linear layer as native code calls it: what `AnyLinear` of decoder.h holds."""

    function: int
    """Address of a function (layer, x, x_stride, T, out, out_stride, num_threads)."""

    layer: int
    """Address of its first argument, which the layer's owner keeps."""

    num_outputs: int


@runtime_checkable
class HasNativeLinear(Protocol):
    """A linear layer that native code can call."""

    @property
    def native(self) -> NativeLinear | None:
        """How. None: it cannot."""
        ...


def native_linear(
    call: Callable[..., int] | None, arguments: ctypes.Structure, num_outputs: int
) -> NativeLinear | None:
    """Return how native code makes a call that Python makes with a function of ctypes, if any."""
    if call is None:
        return None
    # What ctypes calls is a pointer to a function, which its types do not say.
    address = ctypes.cast(call, ctypes.c_void_p).value  # type: ignore[arg-type]
    return NativeLinear(address or 0, ctypes.addressof(arguments), num_outputs)
