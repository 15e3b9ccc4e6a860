"""The gate of a feed-forward layer."""

import torch
import triton
import triton.language as tl

from kernels import cpu_layers
from kernels.checks import ACTIVATIONS, check_contiguous, check_device, check_rows
from kernels.cpu_build import runs_natively
from kernels.tuned import target_of

_TILE = 1024


def silu_and_mul(gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return silu(gate) * up, where gate is the first half of each token and up the second.

    Shapes:
        gate_up       [T, 2 * I]  fp16, bf16 or fp32; each token contiguous
        out, returns  [T, I]      dtype of gate_up, contiguous

    Raises: ValueError if a shape, layout or dtype is not as above.
    Numerics: in fp32, rounded once.
    Cost: reads 2 * T * I elements and writes T * I; bound by memory.
    """
    if runs_natively(gate_up.device):
        return cpu_layers.silu_and_mul(gate_up, out)
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or gate_up.dtype not in ACTIVATIONS:
        raise ValueError(f"gate_up is {list(gate_up.shape)} {gate_up.dtype}, must be [T, 2 * I]")
    T, size = gate_up.shape[0], gate_up.shape[1] // 2
    if out is None:
        out = torch.empty((T, size), dtype=gate_up.dtype, device=gate_up.device)
    if out.shape != (T, size) or out.dtype != gate_up.dtype:
        raise ValueError(f"out is {list(out.shape)} {out.dtype}, must be [{T}, {size}]")
    check_rows("gate_up", gate_up)
    check_contiguous(out=out)
    check_device(gate_up, out=out)
    if T == 0 or size == 0:
        return out
    # Tokens in the first grid dimension: the second ends at 65,535.
    _silu_and_mul[(T, triton.cdiv(size, _TILE))](
        gate_up,
        out,
        gate_up.stride(0),
        SIZE=size,
        TILE=_TILE,
        # Eight elements to a thread: 16 bytes of bf16.
        num_warps=_TILE // 8 // target_of(gate_up.device).warp_size,
        enable_fp_fusion=True,
    )
    return out


@triton.jit
def _silu_and_mul(gate_up_ptr, out_ptr, stride, SIZE: tl.constexpr, TILE: tl.constexpr):
    """One program per (token, tile). Tiles: gate, up [TILE]."""
    token = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = element < SIZE

    gate = tl.load(gate_up_ptr + token * stride + element, inside, 0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + token * stride + SIZE + element, inside, 0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up

    tl.store(out_ptr + token * SIZE + element, out.to(out_ptr.dtype.element_ty), inside)
