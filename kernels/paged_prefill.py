"""Attention of many new tokens per request, after a cached prefix, over paged keys and values."""

import torch
import triton
import triton.language as tl

from kernels.attention_math import blocks_of_tile, normalise, online_softmax, to_log2_scores
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
from kernels.cpu_attention import attend
from kernels.cpu_build import runs_natively
from kernels.fp8 import dequantise
from kernels.tuned import Tile, target_of, tile_of


def paged_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    scale: float,
    max_query_len: int,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    scales: Scales | None = None,
    out: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Return softmax(scale * q @ K.T) @ V for each new token and query head.

    K and V are the keys and values of the token itself and of all before it in its request; query
    head h reads key/value head h // (H / G). Requests with one new token and with thousands go in
    one launch. `window` and `soft_cap` are as in `paged_decode`.

    Shapes:
        q, out, returns   [T, H, D]     fp16, bf16 or fp32, request after request; each token's q
                                        contiguous
        k_cache, v_cache  [N, S, G, D]  dtype of q, or fp8; contiguous; the new tokens are stored
        block_tables      [R, B]        int32, rows contiguous; only the entries of blocks with
                                        a token in sight are read
        seq_lens          [R]           int32, tokens attended to, the new ones included
        query_start_loc   [R + 1]       int32, from 0, not falling; a request may have no new
                                        token. Tokens from the last entry on are not written
        scales            of fp8 keys and values; 1 if not given
        max_query_len     the most new tokens of one request: sets the height of the tile. A wrong
                          one costs time, not correctness

    Raises: ValueError if a shape, layout or dtype is not as above. Values are not read.
    Numerics: as in `paged_decode`.
    Cost: each program reads the keys and values its tokens see, once, for all query heads that
        share them: 2 * D * (tokens seen) per tile of query rows. 4 * D flops per (row, token);
        bound by the tensor cores. A request is not split, so one with a single new token and a
        very long past is better served by `paged_decode`.
    Source: Dao 2023 (arXiv:2307.08691); tiles over (tokens x shared heads) as in vLLM's unified
        Triton kernel (arXiv:2511.11581).
    """
    if runs_natively(q.device):
        return attend(
            q,
            k_cache,
            v_cache,
            block_tables,
            seq_lens,
            query_start_loc,
            scale,
            window=window,
            soft_cap=soft_cap,
            scales=scales,
            out=out,
        )
    check_cache(k_cache, v_cache, q.dtype, scales)
    check_queries(q, k_cache, scales)
    T, H, D = q.shape
    R = seq_lens.shape[0]
    check_requests(q, block_tables, seq_lens, R)
    check_attention_options(window, soft_cap)
    if query_start_loc.shape != (R + 1,) or query_start_loc.dtype != torch.int32:
        raise ValueError(
            f"query_start_loc is {list(query_start_loc.shape)} {query_start_loc.dtype}, must be "
            f"[{R + 1}] int32"
        )
    if out is None:
        out = torch.empty((T, H, D), dtype=q.dtype, device=q.device)
    if out.shape != q.shape or out.dtype != q.dtype:
        raise ValueError(f"out is {list(out.shape)} {out.dtype}, q {list(q.shape)} {q.dtype}")
    check_contiguous(query_start_loc=query_start_loc, out=out)
    check_device(q, query_start_loc=query_start_loc, out=out)
    if T == 0 or R == 0:
        return out
    S, G = k_cache.shape[1:3]
    target = target_of(q.device)
    tile = tile or tile_of("paged_prefill", target, D, q.dtype, k_cache.dtype)
    form = kv_format(k_cache, target)
    rows = count_rows(tile.rows, H // G, max_query_len)
    tokens_per_tile = rows // (H // G)
    # One tile too many per request at most; no length is read back from the device.
    _paged_prefill[(G, T // tokens_per_tile + R)](
        q,
        as_loaded(k_cache, form),
        as_loaded(v_cache, form),
        block_tables,
        seq_lens,
        query_start_loc,
        None if scales is None else scales.k,
        None if scales is None else scales.v,
        out,
        float(scale),
        float(soft_cap or 0.0),
        window or 0,
        R,
        q.stride(0),
        block_tables.stride(0),
        NUM_KV_HEADS=G,
        GROUP=H // G,
        ROWS=rows,
        BLOCK_SIZE=S,
        HEAD_DIM=D,
        DIM_TILE=triton.next_power_of_2(D),
        TILE=tile.tokens,
        SCALE_STRIDE=0 if scales is None or scales.k.shape[0] == 1 else 1,
        FORMAT=form,
        SOFT_CAPPED=soft_cap is not None,
        WINDOWED=window is not None,
        # The interpreter multiplies bf16 tiles as if their bits were integers.
        DOT=tl.float32 if target.interpreted else None,
        PRECISION=target.fp32_products,
        num_warps=tile.num_warps if rows >= tile.rows else 4,
        enable_fp_fusion=True,
        num_stages=tile.num_stages,
    )
    return out


def count_rows(most: int, group: int, max_query_len: int) -> int:
    """Return the height of a tile: no more than the tokens of a request fill, a power of two."""
    filled: int = triton.next_power_of_2(max(16, group * max_query_len))
    least: int = triton.next_power_of_2(group)
    return max(min(most, filled), least)


@triton.jit
def _paged_prefill(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_tables_ptr,
    seq_lens_ptr,
    query_start_loc_ptr,
    k_scale_ptr,
    v_scale_ptr,
    out_ptr,
    scale,
    soft_cap,
    window,
    num_requests,
    q_stride,
    table_stride,
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
    WINDOWED: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program per (key/value head, tile of a request's new tokens).

    A row is one token under one of the GROUP query heads that share the key/value head.
    Tiles: q, acc [ROWS, D]; k, v [TILE, D]; scores [ROWS, TILE]; best, total, place [ROWS].
    """
    TOKENS: tl.constexpr = ROWS // GROUP
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty if DOT is None else DOT
    kv_head = tl.program_id(0)
    # The last tiles of a request see the most keys: they go first, so that none ends alone.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    request = _request_of_tile(query_start_loc_ptr, num_requests, tile, TOKENS)
    query_start = tl.load(query_start_loc_ptr + request)
    num_new = tl.load(query_start_loc_ptr + request + 1) - query_start
    first_token = (tile - query_start // TOKENS - request) * TOKENS
    if first_token >= num_new:
        return
    seq_len = tl.load(seq_lens_ptr + request)
    num_cached = seq_len - num_new

    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIM_TILE)
    token = first_token + row // GROUP
    head = kv_head * GROUP + row % GROUP
    real = ((row < TOKENS * GROUP) & (token < num_new))[:, None] & (dim < HEAD_DIM)[None, :]
    q_row = (query_start + token).to(tl.int64) * q_stride + head * HEAD_DIM
    q = tl.load(q_ptr + q_row[:, None] + dim[None, :], real, 0.0).to(DTYPE)
    if k_scale_ptr is not None:
        scale *= tl.load(k_scale_ptr + kv_head * SCALE_STRIDE)

    # `place` is where in its sequence a row's token stands: it sees keys up to there.
    place = num_cached + token
    end = tl.minimum(num_cached + first_token + TOKENS, seq_len)
    first_seen = 0
    if WINDOWED:
        first_seen = tl.maximum(num_cached + first_token - window + 1, 0)
    table_ptr = block_tables_ptr + request.to(tl.int64) * table_stride
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM_TILE], tl.float32)
    start = first_seen // TILE * TILE
    # Every row sees all of the tiles that end before the first token: those need no mask. With a
    # window there are too few of them to be worth a loop of their own.
    if not WINDOWED:
        masked_from = (num_cached + first_token + 1) // TILE * TILE
        best, total, acc = _attend(
            q, best, total, acc, place, k_cache_ptr, v_cache_ptr, table_ptr, kv_head, 0,
            masked_from, 0, scale, soft_cap, window, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, DIM_TILE,
            TILE, FORMAT, SOFT_CAPPED, False, False, DTYPE, PRECISION,
        )  # fmt: skip
        start = masked_from
    best, total, acc = _attend(
        q, best, total, acc, place, k_cache_ptr, v_cache_ptr, table_ptr, kv_head, start, end,
        first_seen, scale, soft_cap, window, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, DIM_TILE, TILE,
        FORMAT, SOFT_CAPPED, True, WINDOWED, DTYPE,
        PRECISION,
    )  # fmt: skip

    out = normalise(acc, total)
    if v_scale_ptr is not None:
        out *= tl.load(v_scale_ptr + kv_head * SCALE_STRIDE)
    out_row = (query_start + token).to(tl.int64) * (NUM_KV_HEADS * GROUP) + head
    tl.store(
        out_ptr + (out_row * HEAD_DIM)[:, None] + dim[None, :],
        out.to(out_ptr.dtype.element_ty),
        real,
    )


@triton.jit
def _request_of_tile(query_start_loc_ptr, num_requests, tile, TOKENS: tl.constexpr):
    """Return the last request whose tiles start at or before `tile`.

    Request r's tiles start at query_start_loc[r] // TOKENS + r: room for its own tiles and for
    one broken tile of each request before it.
    """
    low = 0
    high = num_requests
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start_loc_ptr + middle) // TOKENS + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _attend(
    q,
    best,
    total,
    acc,
    place,
    k_cache_ptr,
    v_cache_ptr,
    table_ptr,
    kv_head,
    start,
    end,
    first_seen,
    scale,
    soft_cap,
    window,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    TILE: tl.constexpr,
    FORMAT: tl.constexpr,
    SOFT_CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Let all rows attend to the keys of [start, end). Unmasked, every row sees all of them."""
    dim = tl.arange(0, DIM_TILE)
    block = blocks_of_tile(table_ptr, start, first_seen, end, BLOCK_SIZE, TILE)
    for first in range(start, end, TILE):
        position = first + tl.arange(0, TILE)
        slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        kv_offset = (slot * (NUM_KV_HEADS * HEAD_DIM))[:, None] + kv_head * HEAD_DIM + dim[None, :]
        loaded = (dim < HEAD_DIM)[None, :]
        if MASKED:
            # Unseen slots may hold NaN, and 0 * NaN is NaN: they are not loaded.
            loaded = loaded & ((position >= first_seen) & (position < end))[:, None]
        k = dequantise(tl.load(k_cache_ptr + kv_offset, loaded, 0.0), FORMAT, DTYPE)
        v = dequantise(tl.load(v_cache_ptr + kv_offset, loaded, 0.0), FORMAT, DTYPE)
        # The next tile's blocks are fetched while this one is worked on.
        block = blocks_of_tile(table_ptr, first + TILE, first_seen, end, BLOCK_SIZE, TILE)

        products = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        scores = to_log2_scores(products, scale, soft_cap, SOFT_CAPPED)
        if MASKED:
            seen = position[None, :] <= place[:, None]
            if WINDOWED:
                seen = seen & (position[None, :] > place[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        weights, shrink, best, total = online_softmax(scores, best, total)
        acc = tl.dot(weights.to(DTYPE), v, acc * shrink[:, None], input_precision=PRECISION)
    return best, total, acc
