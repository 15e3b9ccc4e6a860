"""Decoding of requests that begin alike: the common prefix is read once for all of them."""

import torch
import triton
import triton.language as tl

from kernels.attention_math import (
    blocks_of_tile,
    log2_sum,
    normalise,
    online_softmax,
    to_log2_scores,
)
from kernels.checks import (
    Scales,
    as_loaded,
    check_attention_options,
    check_cache,
    check_contiguous,
    check_device,
    check_queries,
    check_requests,
    kv_format,
)
from kernels.fp8 import dequantise
from kernels.merge_splits import merge_splits
from kernels.paged_decode import count_splits, launch_decode
from kernels.tuned import Tile, target_of, tile_of


def shared_prefix(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    shared_blocks: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    max_seq_len: int,
    *,
    soft_cap: float | None = None,
    scales: Scales | None = None,
    out: torch.Tensor | None = None,
    num_splits: tuple[int, int] | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Return what `paged_decode` does, for requests whose first blocks are all `shared_blocks`.

    Three launches: all queries over the prefix, each query over its own rest, and the merge of
    the two by the logarithms of their sums.

    Shapes:
        shared_blocks  [P]  int32, contiguous, at least one; the first P entries of each block
                            table in use, which are not read
        seq_lens       [R]  int32, at least P * S; 0 for an unused row, which gives 0
        num_splits     of the prefix and of the rest, instead of those that fill the GPU
        q, k_cache, v_cache, block_tables, scales, max_seq_len, out: as in `paged_decode`

    Raises: ValueError if a shape, layout or dtype is not as above. Values are not read.
    Numerics: as in `paged_decode`.
    Cost: reads the prefix once per tile of query rows instead of once per request:
        2 * G * D * (P * S * tiles + own tokens) elements, tiles = R * H / G / rows.
        `dispatch.cascade_pays` says when that is less than `paged_decode` moves.
    Source: Hydragen (arXiv:2402.05099); cascade inference, FlashInfer (arXiv:2501.01005).
    """
    check_cache(k_cache, v_cache, q.dtype, scales)
    check_queries(q, k_cache, scales)
    R, H, D = q.shape
    check_requests(q, block_tables, seq_lens, R)
    check_attention_options(None, soft_cap)
    if shared_blocks.dim() != 1 or shared_blocks.dtype != torch.int32 or not len(shared_blocks):
        raise ValueError(
            f"shared_blocks is {list(shared_blocks.shape)} {shared_blocks.dtype}, must be [P] "
            "int32, P at least 1"
        )
    if out is None:
        out = torch.empty((R, H, D), dtype=q.dtype, device=q.device)
    check_contiguous(shared_blocks=shared_blocks, out=out)
    check_device(q, shared_blocks=shared_blocks, out=out)
    if R == 0:
        return out
    S, G = k_cache.shape[1:3]
    prefix = shared_blocks.shape[0] * S
    target = target_of(q.device)
    prefix_tile = tile or tile_of("shared_prefix", target, D, q.dtype, k_cache.dtype)
    rows = max(16, min(prefix_tile.rows, triton.next_power_of_2(R * (H // G))))
    if num_splits is None:
        row_tiles = triton.cdiv(R * (H // G), rows)
        rest = max(max_seq_len - prefix, 1)
        num_splits = (
            count_splits(G * row_tiles, prefix, prefix, target.num_processors),
            count_splits(G, rest, R * rest, target.num_processors),
        )
    P = sum(num_splits)
    partial = torch.empty((R, H, P, D), dtype=torch.float32, device=q.device)
    sums = torch.empty((R, H, P), dtype=torch.float32, device=q.device)
    form = kv_format(k_cache, target)
    # Tiles of rows that read the same keys are neighbours: all but the first find them in the L2.
    _shared_prefix[(triton.cdiv(R * (H // G), rows), G, num_splits[0])](
        q,
        as_loaded(k_cache, form),
        as_loaded(v_cache, form),
        shared_blocks,
        seq_lens,
        None if scales is None else scales.k,
        None if scales is None else scales.v,
        partial,
        sums,
        float(scale),
        float(soft_cap or 0.0),
        prefix,
        R,
        q.stride(0),
        num_splits[0],
        P,
        NUM_KV_HEADS=G,
        GROUP=H // G,
        ROWS=rows,
        BLOCK_SIZE=S,
        HEAD_DIM=D,
        DIM_TILE=triton.next_power_of_2(D),
        TILE=prefix_tile.tokens,
        SCALE_STRIDE=0 if scales is None or scales.k.shape[0] == 1 else 1,
        FORMAT=form,
        SOFT_CAPPED=soft_cap is not None,
        # The interpreter multiplies bf16 tiles as if their bits were integers.
        DOT=tl.float32 if target.interpreted else None,
        PRECISION=target.fp32_products,
        num_warps=prefix_tile.num_warps if rows >= prefix_tile.rows else 4,
        enable_fp_fusion=True,
        num_stages=prefix_tile.num_stages,
    )
    launch_decode(
        q,
        k_cache,
        v_cache,
        block_tables,
        seq_lens,
        scale,
        partial,
        sums,
        num_splits[1],
        num_splits[0],
        prefix,
        None,
        soft_cap,
        scales,
        None,
    )
    merge_splits(partial, sums, out)
    return out


@triton.jit
def _shared_prefix(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    shared_blocks_ptr,
    seq_lens_ptr,
    k_scale_ptr,
    v_scale_ptr,
    partial_ptr,
    log2_sums_ptr,
    scale,
    soft_cap,
    prefix,
    num_requests,
    q_stride,
    num_splits,
    num_parts,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    TILE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    FORMAT: tl.constexpr,
    SOFT_CAPPED: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program per (tile of query rows, key/value head, split of the prefix).

    A row is one request under one of the GROUP query heads that share the key/value head.
    Tiles: q, acc [ROWS, D]; k, v [TILE, D]; scores [ROWS, TILE]; best, total [ROWS].
    """
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty if DOT is None else DOT
    split = tl.program_id(2)
    kv_head = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    request = (row // GROUP).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    dim = tl.arange(0, DIM_TILE)
    exists = request < num_requests
    # A row without tokens has no prefix either.
    used = tl.load(seq_lens_ptr + request, exists, 0) > 0
    inside = (dim < HEAD_DIM)[None, :]
    share = tl.cdiv(tl.cdiv(prefix, num_splits), TILE) * TILE
    start = split * share
    end = tl.minimum(start + share, prefix)

    q_row = request * q_stride + head * HEAD_DIM
    q = tl.load(q_ptr + q_row[:, None] + dim[None, :], used[:, None] & inside, 0.0).to(DTYPE)
    if k_scale_ptr is not None:
        scale *= tl.load(k_scale_ptr + kv_head * SCALE_STRIDE)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM_TILE], tl.float32)
    block = blocks_of_tile(shared_blocks_ptr, start, 0, end, BLOCK_SIZE, TILE)
    for first in range(start, end, TILE):
        position = first + tl.arange(0, TILE)
        slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        kv_offset = (slot * (NUM_KV_HEADS * HEAD_DIM))[:, None] + kv_head * HEAD_DIM + dim[None, :]
        loaded = (position < end)[:, None] & inside
        k = dequantise(tl.load(k_cache_ptr + kv_offset, loaded, 0.0), FORMAT, DTYPE)
        v = dequantise(tl.load(v_cache_ptr + kv_offset, loaded, 0.0), FORMAT, DTYPE)
        block = blocks_of_tile(shared_blocks_ptr, first + TILE, 0, end, BLOCK_SIZE, TILE)

        products = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        scores = to_log2_scores(products, scale, soft_cap, SOFT_CAPPED)
        scores = tl.where((position < end)[None, :], scores, float("-inf"))
        weights, shrink, best, total = online_softmax(scores, best, total)
        acc = tl.dot(weights.to(DTYPE), v, acc * shrink[:, None], input_precision=PRECISION)

    out = normalise(acc, total)
    if v_scale_ptr is not None:
        out *= tl.load(v_scale_ptr + kv_head * SCALE_STRIDE)
    part = (request * (NUM_KV_HEADS * GROUP) + head) * num_parts + split
    sums = tl.where(used, log2_sum(best, total), float("-inf"))
    tl.store(log2_sums_ptr + part, sums, exists)
    # An empty part is known by its sum.
    filled = used[:, None] & (dim < tl.where(start < end, HEAD_DIM, 0))[None, :]
    tl.store(partial_ptr + (part * HEAD_DIM)[:, None] + dim[None, :], out, filled)
