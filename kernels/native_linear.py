"""A linear layer as other native code calls it."""

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
