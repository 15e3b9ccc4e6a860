"""A linear layer whose matrix is laid out once, for the processor's products."""

import torch
from torch.nn import functional

# oneDNN chooses the layout for products of so many rows.
_PACKED_FOR_ROWS = 64
# One row of fp32 takes oneDNN up to 1.3 times as long as six, with the same packed matrix; so rows
# of zeros are added (measured on Zen 4, docs/performance.md).
_LEAST_ROWS = 6


class PackedLinear:
    """x @ weight.T + bias on a CPU, with the weight packed where oneDNN can.

    Shapes: weight [O, I], bias [O], both fp32, bf16 or fp16. The weight is copied: the caller may
        drop it. Where it cannot be packed (fp16 on most processors), it is kept as it is.
    """

    __slots__ = ("_bias", "_is_packed", "_num_rows", "_weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Raises: ValueError if the shapes do not fit, or the weight is not on a CPU."""
        if weight.dim() != 2 or weight.device.type != "cpu":
            raise ValueError(f"weight is {list(weight.shape)} on {weight.device}, must be [O, I]")
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ValueError(f"bias is {list(bias.shape)}, weight {list(weight.shape)}")
        self._bias = bias
        self._num_rows = weight.shape[0]
        self._is_packed = packs(weight.dtype)
        self._weight = weight
        if self._is_packed:
            pack = torch.ops.mkldnn._reorder_linear_weight
            self._weight = pack(weight.contiguous(), _PACKED_FOR_ROWS)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product. Shapes: x [T, I], returns [T, O].

        Numerics: as torch's own; sums in fp32, rounded once.
        """
        T = x.shape[0]
        if T == 0:
            return x.new_empty((0, self._num_rows))
        if not self._is_packed:
            return functional.linear(x, self._weight, self._bias)
        if T < _LEAST_ROWS:
            x = functional.pad(x, (0, 0, 0, _LEAST_ROWS - T))
        multiply = torch.ops.mkldnn._linear_pointwise
        out: torch.Tensor = multiply(x, self._weight, self._bias, "none", [], "")
        return out[:T]


def packs(dtype: torch.dtype) -> bool:
    """Return whether oneDNN packs matrices of `dtype` on this processor."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    match dtype:
        case torch.float32:
            return True
        case torch.bfloat16:
            return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        case torch.float16:
            return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
        case _:
            return False
