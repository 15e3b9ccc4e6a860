"""Low-rank adapters, a different one for each token, in two launches."""

import torch
import triton
import triton.language as tl

from kernels.adapter_runs import AdapterRuns
from kernels.checks import ACTIVATIONS, check_contiguous, check_device, check_rows
from kernels.tuned import target_of

_ROWS = 16
_COLUMNS = 128
_DEPTH = 128
# A decoding batch has few tiles: the long sum of `shrink` is split to fill the GPU.
_SPLITS = 8


def multi_lora(
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scale: torch.Tensor,
    runs: AdapterRuns,
    y: torch.Tensor,
) -> None:
    """Add scale[l] * (x @ a[l].T) @ b[l].T to y in place, where l is each token's adapter.

    Tokens without an adapter keep their y, bit by bit.

    Shapes:
        x      [T, E]     fp16, bf16 or fp32; each token contiguous
        a      [L, r, E]  dtype of x, contiguous; r from 1 to 128
        b      [L, O, r]  dtype of x, contiguous
        scale  [L]        fp32
        y      [T, O]     dtype of x; each token contiguous, read and written in place

    Raises: ValueError if a shape, layout or dtype is not as above.
    Numerics: sums in fp32; x @ a.T is rounded to x's dtype before b multiplies it.
    Cost: reads x, the a and b of adapters in use, and y; writes y. Bound by memory.
    Source: Punica (arXiv:2310.18547); shrink and expand as in vLLM.
    """
    if x.dim() != 2 or x.dtype not in ACTIVATIONS or a.dim() != 3 or a.shape[2] != x.shape[1]:
        raise ValueError(f"x {list(x.shape)} {x.dtype} does not fit a {list(a.shape)}")
    T, E = x.shape
    L, rank, _ = a.shape
    if b.dim() != 3 or (b.shape[0], b.shape[2]) != (L, rank) or not 1 <= rank <= 128:
        raise ValueError(
            f"a {list(a.shape)} and b {list(b.shape)} must be [L, r, E] and "
            "[L, O, r], r from 1 to 128"
        )
    if y.shape != (T, b.shape[1]):
        raise ValueError(f"y is {list(y.shape)}, must be [{T}, {b.shape[1]}]")
    if not x.dtype == a.dtype == b.dtype == y.dtype:
        raise ValueError(f"x {x.dtype}, a {a.dtype}, b {b.dtype} and y {y.dtype} must be the same")
    if scale.shape != (L,) or scale.dtype != torch.float32:
        raise ValueError(f"scale is {list(scale.shape)} {scale.dtype}, must be [{L}] float32")
    if runs.order.shape != (T,) or runs.starts.shape != (L + 1,):
        raise ValueError(
            f"runs of {runs.order.shape[0]} tokens and {runs.starts.shape[0] - 1} "
            f"adapters do not fit {T} and {L}"
        )
    check_rows("x", x)
    check_rows("y", y)
    check_contiguous(a=a, b=b, scale=scale)
    check_device(x, a=a, b=b, scale=scale, y=y, order=runs.order, starts=runs.starts)
    if T == 0 or L == 0:
        return
    splits = max(1, min(_SPLITS, E // _DEPTH))
    shrunk = torch.empty((splits, T, rank), dtype=torch.float32, device=x.device)
    dot = tl.float32 if target_of(x.device).interpreted else None
    tiles = triton.cdiv(T, _ROWS)
    rank_tile = max(16, triton.next_power_of_2(rank))
    _shrink[(splits, tiles, L)](
        x, a, runs.order, runs.starts, shrunk, x.stride(0), T, SIZE=E, RANK=rank,
        RANK_TILE=rank_tile, ROWS=_ROWS, DEPTH=_DEPTH, SPLITS=splits, DOT=dot, num_warps=4,
        num_stages=3, enable_fp_fusion=True,
    )  # fmt: skip
    _expand[(triton.cdiv(y.shape[1], _COLUMNS), tiles, L)](
        shrunk, b, scale, runs.order, runs.starts, y, y.stride(0), T, SIZE=y.shape[1], RANK=rank,
        RANK_TILE=rank_tile, ROWS=_ROWS, COLUMNS=_COLUMNS, SPLITS=splits, DOT=dot, num_warps=4,
        enable_fp_fusion=True,
    )  # fmt: skip


@triton.jit
def _tokens_of_tile(order_ptr, starts_ptr, adapter, tile, ROWS: tl.constexpr):
    """Return the places of a tile's tokens, and which of them exist."""
    start = tl.load(starts_ptr + adapter) + tile * ROWS
    end = tl.load(starts_ptr + adapter + 1)
    row = start + tl.arange(0, ROWS)
    return tl.load(order_ptr + row, row < end, 0).to(tl.int64), row < end


@triton.jit
def _shrink(
    x_ptr,
    a_ptr,
    order_ptr,
    starts_ptr,
    shrunk_ptr,
    x_stride,
    num_tokens,
    SIZE: tl.constexpr,
    RANK: tl.constexpr,
    RANK_TILE: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    SPLITS: tl.constexpr,
    DOT: tl.constexpr,
):
    """One program per (split of the sum, tile of tokens, adapter).

    Tiles: x [ROWS, DEPTH]; a [RANK, DEPTH]; acc [ROWS, RANK].
    """
    split = tl.program_id(0)
    adapter = tl.program_id(2).to(tl.int64)
    if tl.load(starts_ptr + adapter) + tl.program_id(1) * ROWS >= tl.load(starts_ptr + adapter + 1):
        return
    token, exists = _tokens_of_tile(order_ptr, starts_ptr, adapter, tl.program_id(1), ROWS)
    rank = tl.arange(0, RANK_TILE)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty if DOT is None else DOT

    acc = tl.zeros([ROWS, RANK_TILE], tl.float32)
    for start in range(split * DEPTH, SIZE, SPLITS * DEPTH):
        element = start + tl.arange(0, DEPTH)
        inside = (element < SIZE)[None, :]
        x_at = x_ptr + (token * x_stride)[:, None] + element[None, :]
        a_at = a_ptr + ((adapter * RANK + rank) * SIZE)[:, None] + element[None, :]
        x = tl.load(x_at, exists[:, None] & inside, 0.0).to(DTYPE)
        a = tl.load(a_at, (rank < RANK)[:, None] & inside, 0.0).to(DTYPE)
        acc = tl.dot(x, tl.trans(a), acc, input_precision="ieee")

    to = shrunk_ptr + ((split * num_tokens + token) * RANK)[:, None] + rank[None, :]
    tl.store(to, acc, exists[:, None] & (rank < RANK)[None, :])


@triton.jit
def _expand(
    shrunk_ptr,
    b_ptr,
    scale_ptr,
    order_ptr,
    starts_ptr,
    y_ptr,
    y_stride,
    num_tokens,
    SIZE: tl.constexpr,
    RANK: tl.constexpr,
    RANK_TILE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    DOT: tl.constexpr,
):
    """One program per (tile of columns, tile of tokens, adapter).

    Tiles: shrunk [ROWS, RANK]; b [COLUMNS, RANK]; y [ROWS, COLUMNS].
    """
    adapter = tl.program_id(2).to(tl.int64)
    if tl.load(starts_ptr + adapter) + tl.program_id(1) * ROWS >= tl.load(starts_ptr + adapter + 1):
        return
    token, exists = _tokens_of_tile(order_ptr, starts_ptr, adapter, tl.program_id(1), ROWS)
    rank = tl.arange(0, RANK_TILE)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    IN: tl.constexpr = y_ptr.dtype.element_ty
    DTYPE: tl.constexpr = IN if DOT is None else DOT

    shrunk = tl.zeros([ROWS, RANK_TILE], tl.float32)
    for split in tl.static_range(SPLITS):
        at = shrunk_ptr + ((split * num_tokens + token) * RANK)[:, None] + rank[None, :]
        shrunk += tl.load(at, exists[:, None] & (rank < RANK)[None, :], 0.0)
    b_at = b_ptr + ((adapter * SIZE + column) * RANK)[:, None] + rank[None, :]
    b = tl.load(b_at, (column < SIZE)[:, None] & (rank < RANK)[None, :], 0.0).to(DTYPE)
    y_at = y_ptr + (token * y_stride)[:, None] + column[None, :]
    inside = exists[:, None] & (column < SIZE)[None, :]
    y = tl.load(y_at, inside, 0.0).to(tl.float32)
    y += tl.dot(shrunk.to(IN).to(DTYPE), tl.trans(b), input_precision="ieee") * tl.load(
        scale_ptr + adapter
    )

    tl.store(y_at, y.to(IN), inside)
