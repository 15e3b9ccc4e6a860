"""Joining attention over parts of a sequence into attention over the whole."""

import torch
import triton
import triton.language as tl

from kernels.checks import ACTIVATIONS, check_contiguous, check_device


def merge_splits(partial: torch.Tensor, log2_sums: torch.Tensor, out: torch.Tensor) -> None:
    """Write to `out` the mean of the parts, each weighted by its share of the softmax's sum.

    Shapes:
        partial    [T, H, P, D]  fp32, contiguous; a part with a sum of -inf is not read
        log2_sums  [T, H, P]     fp32, contiguous; base-2 logarithms, -inf for an empty part
        out        [T, H, D]     fp16, bf16 or fp32, contiguous

    Raises: ValueError if a shape, layout or dtype is not as above.
    Numerics: in fp32, rounded once. If all parts are empty, 0.
    Cost: reads T * H * P * (D + 1) * 4 bytes at most, writes out once.
    Source: Dao et al. 2023, Flash-Decoding.
    """
    if partial.dim() != 4 or log2_sums.shape != partial.shape[:3]:
        raise ValueError(
            f"partial {list(partial.shape)} and log2_sums {list(log2_sums.shape)} "
            "must be [T, H, P, D] and [T, H, P]"
        )
    T, H, P, D = partial.shape
    if out.shape != (T, H, D) or out.dtype not in ACTIVATIONS:
        raise ValueError(f"out is {list(out.shape)} {out.dtype}, must be [{T}, {H}, {D}]")
    if partial.dtype != torch.float32 or log2_sums.dtype != torch.float32:
        raise ValueError(f"partial is {partial.dtype}, log2_sums {log2_sums.dtype}, must be fp32")
    check_contiguous(partial=partial, log2_sums=log2_sums, out=out)
    check_device(out, partial=partial, log2_sums=log2_sums)
    if T == 0:
        return
    _merge_splits[(T * H,)](
        partial,
        log2_sums,
        out,
        P,
        PARTS=triton.next_power_of_2(P),
        HEAD_DIM=D,
        DIM_TILE=triton.next_power_of_2(D),
        num_warps=4,
        enable_fp_fusion=True,
    )


@triton.jit
def _merge_splits(
    partial_ptr,
    log2_sums_ptr,
    out_ptr,
    num_parts,
    PARTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
):
    """One program per (token, query head). Tiles: log2_sum, weight [P]; out [D]."""
    head = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    dim = tl.arange(0, DIM_TILE)

    log2_sum = tl.load(log2_sums_ptr + head * num_parts + part, part < num_parts, float("-inf"))
    best = tl.max(log2_sum, 0)
    origin = tl.where(best == float("-inf"), 0.0, best)
    total = tl.sum(tl.exp2(log2_sum - origin), 0)
    out = tl.zeros([DIM_TILE], tl.float32)
    for i in range(num_parts):
        one = tl.load(log2_sums_ptr + head * num_parts + i)
        # An empty part was not written.
        width = tl.where(one == float("-inf"), 0, HEAD_DIM)
        value = tl.load(partial_ptr + (head * num_parts + i) * HEAD_DIM + dim, dim < width, 0.0)
        out += value * tl.exp2(one - origin)

    out = out / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + head * HEAD_DIM + dim, out.to(out_ptr.dtype.element_ty), dim < HEAD_DIM)
