"""What the gate of a gated linear layer goes through."""

from enum import IntEnum


class Activation(IntEnum):
    """An activation, by its number in kernels/cpu/activation.h. 0 there: the layer has no gate."""

    SILU = 1
    GELU = 2
    """By its approximation with tanh. Source: Hendrycks and Gimpel 2016 (arXiv:1606.08415)."""
