"""Root-mean-square normalisation, with the residual added on the way."""

import torch
import triton
import triton.language as tl

from kernels import cpu_layers
from kernels.checks import ACTIVATIONS, check_contiguous, check_device, check_rows
from kernels.cpu_build import runs_natively

# One program holds a whole token in registers: 32 fp32 numbers for each of 512 threads.
_MAX_SIZE = 16384


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return y / sqrt(mean(y ** 2) + eps) * weight, where y is x, or residual + x.

    With a residual, y is also written to it, rounded to its dtype; what is normalised is the
    rounded y, so that fused and separate addition give the same bits.

    Shapes:
        x         [T, E]  fp16, bf16 or fp32; each token contiguous; E at most 16,384
        weight    [E]     dtype of x, contiguous
        residual  [T, E]  dtype of x, contiguous, read and written in place
        out       [T, E]  dtype of x, contiguous; may be x itself
        returns   out

    Raises: ValueError if a shape, layout or dtype is not as above.
    Numerics: in fp32, rounded once.
    Cost: reads x (and the residual) once and writes each once; bound by memory.
    Source: Zhang and Sennrich 2019 (arXiv:1910.07467).
    """
    if runs_natively(x.device):
        return cpu_layers.rms_norm(x, weight, eps, residual, out)
    if x.dim() != 2 or x.dtype not in ACTIVATIONS or not 0 < x.shape[1] <= _MAX_SIZE:
        raise ValueError(f"x is {list(x.shape)} {x.dtype}, must be [T, E], E at most {_MAX_SIZE}")
    T, E = x.shape
    if weight.shape != (E,) or weight.dtype != x.dtype:
        raise ValueError(f"weight is {list(weight.shape)} {weight.dtype}, must be [{E}] {x.dtype}")
    if out is None:
        out = torch.empty((T, E), dtype=x.dtype, device=x.device)
    for name, tensor in (("residual", residual), ("out", out)):
        if tensor is None:
            continue
        if tensor.shape != x.shape or tensor.dtype != x.dtype:
            raise ValueError(
                f"{name} is {list(tensor.shape)} {tensor.dtype}, must be as x: "
                f"{list(x.shape)} {x.dtype}"
            )
        check_contiguous(**{name: tensor})
        check_device(x, **{name: tensor})
    check_rows("x", x)
    check_contiguous(weight=weight)
    check_device(x, weight=weight)
    if T == 0:
        return out
    tile = triton.next_power_of_2(E)
    _rms_norm[(T,)](
        x,
        weight,
        residual,
        out,
        x.stride(0),
        float(eps),
        SIZE=E,
        TILE=tile,
        num_warps=max(4, min(16, tile // 1024)),
        enable_fp_fusion=True,
    )
    return out


@triton.jit
def _rms_norm(
    x_ptr, weight_ptr, residual_ptr, out_ptr, x_stride, eps, SIZE: tl.constexpr, TILE: tl.constexpr
):
    """One program per token. Tiles: y, weight [E]."""
    token = tl.program_id(0).to(tl.int64)
    element = tl.arange(0, TILE)
    inside = element < SIZE

    y = tl.load(x_ptr + token * x_stride + element, inside, 0.0).to(tl.float32)
    if residual_ptr is not None:
        y += tl.load(residual_ptr + token * SIZE + element, inside, 0.0).to(tl.float32)
        rounded = y.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + token * SIZE + element, rounded, inside)
        y = rounded.to(tl.float32)
    mean = tl.sum(y * y, 0) / SIZE
    weight = tl.load(weight_ptr + element, inside, 0.0).to(tl.float32)
    out = y * (1.0 / tl.sqrt_rn(mean + eps)) * weight

    tl.store(out_ptr + token * SIZE + element, out.to(out_ptr.dtype.element_ty), inside)
