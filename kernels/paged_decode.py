"""Attention of one new token per request over its paged keys and values."""

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
    check_queries,
    check_requests,
    kv_format,
)
from kernels.cpu_attention import attend
from kernels.cpu_build import runs_natively
from kernels.fp8 import dequantise
from kernels.merge_splits import merge_splits
from kernels.tuned import Tile, target_of, tile_of

# Programs per multiprocessor: two fit with their pipelines full, and twice that evens the ends.
_WAVES = 4
# Below this many tokens a split costs more, in the merge, than it hides.
_MIN_SPLIT_TOKENS = 256
# Bounds the scratch memory: R * H * 64 * (D + 1) * 4 bytes.
_MAX_SPLITS = 64


def paged_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    max_seq_len: int,
    *,
    num_tokens: int | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    scales: Scales | None = None,
    out: torch.Tensor | None = None,
    num_splits: int | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Return softmax(scale * q @ K.T) @ V for each request and query head.

    K and V are the request's cached keys and values, found through its block table; query head h
    reads key/value head h // (H / G). With a window W, a token sees itself and the W - 1 before
    it. With a soft cap c, a score s becomes c * tanh(s / c).

    Shapes:
        q, out, returns   [R, H, D]     fp16, bf16 or fp32; each request's q contiguous
        k_cache, v_cache  [N, S, G, D]  dtype of q, or fp8; contiguous
        block_tables      [R, B]        int32, rows contiguous; only the entries of blocks with
                                        a token in sight are read
        seq_lens          [R]           int32, counts the new token. 0 for an unused row, which
                                        reads nothing and gives 0
        scales            of fp8 keys and values; 1 if not given
        max_seq_len       the longest of seq_lens, or more: with the number of requests it sets
                          how often sequences are split. A wrong one costs time, not correctness
        num_tokens        sum of seq_lens, if the caller knows it: uneven lengths then split finer

    Raises: ValueError if a shape, layout or dtype is not as above. Values are not read.
    Numerics: scores and sums in fp32; weights are rounded to q's dtype for the tensor cores, so
        the result is within one rounding plus 2**-8 (bf16) or 2**-11 (fp16) of the largest value
        in sight. In fp32 within 1e-5 for values of size 1.
    Cost: reads 2 * tokens in sight * G * D elements per request, each once, and with splits
        writes and reads H * splits * (D + 1) * 4 bytes per request; bound by memory.
    Source: paging, Kwon et al. 2023 (arXiv:2309.06180); splits, Dao et al. 2023, Flash-Decoding.
    """
    if runs_natively(q.device):
        return attend(
            q,
            k_cache,
            v_cache,
            block_tables,
            seq_lens,
            None,
            scale,
            window=window,
            soft_cap=soft_cap,
            scales=scales,
            out=out,
        )
    check_cache(k_cache, v_cache, q.dtype, scales)
    check_queries(q, k_cache, scales)
    R, H, D = q.shape
    check_requests(q, block_tables, seq_lens, R)
    check_attention_options(window, soft_cap)
    if out is None:
        out = torch.empty((R, H, D), dtype=q.dtype, device=q.device)
    check_contiguous(out=out)
    if R == 0:
        return out
    G = k_cache.shape[2]
    if num_splits is None:
        in_sight = max_seq_len if window is None else min(window, max_seq_len)
        total = R * in_sight if num_tokens is None else min(num_tokens, R * in_sight)
        num_splits = count_splits(G, in_sight, total, target_of(q.device).num_processors)
    if num_splits == 1:
        launch_decode(
            q,
            k_cache,
            v_cache,
            block_tables,
            seq_lens,
            scale,
            out,
            None,
            1,
            0,
            0,
            window,
            soft_cap,
            scales,
            tile,
        )
        return out
    partial = torch.empty((R, H, num_splits, D), dtype=torch.float32, device=q.device)
    sums = torch.empty((R, H, num_splits), dtype=torch.float32, device=q.device)
    launch_decode(
        q,
        k_cache,
        v_cache,
        block_tables,
        seq_lens,
        scale,
        partial,
        sums,
        num_splits,
        0,
        0,
        window,
        soft_cap,
        scales,
        tile,
    )
    merge_splits(partial, sums, out)
    return out


def count_splits(num_kv_heads: int, longest: int, total: int, num_processors: int) -> int:
    """Return into how many parts the longest sequence is split.

    Each part gets an equal share of all (token, key/value head) pairs, so that every
    multiprocessor has `_WAVES` programs; no part is shorter than `_MIN_SPLIT_TOKENS`.
    """
    fair = total * num_kv_heads / (_WAVES * num_processors)
    return max(1, min(_MAX_SPLITS, int(longest / max(fair, _MIN_SPLIT_TOKENS) + 0.5)))


def launch_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    log2_sums: torch.Tensor | None,
    num_splits: int,
    first_part: int,
    skipped_tokens: int,
    window: int | None,
    soft_cap: float | None,
    scales: Scales | None,
    tile: Tile | None,
) -> None:
    """Launch the kernel on checked arguments: into `out`, or into parts `first_part` and on.

    Shapes: with log2_sums [R, H, P], out is the partial [R, H, P, D] that merge_splits reads. The
        first `skipped_tokens` of each sequence are left to another kernel (`shared_prefix`).
    """
    R, H, D = q.shape
    S, G = k_cache.shape[1:3]
    target = target_of(q.device)
    tile = tile or tile_of("paged_decode", target, D, q.dtype, k_cache.dtype)
    form = kv_format(k_cache, target)
    head_tile = max(16, min(64, triton.next_power_of_2(H // G)))
    _paged_decode[(num_splits, G * triton.cdiv(H // G, head_tile), R)](
        q,
        as_loaded(k_cache, form),
        as_loaded(v_cache, form),
        block_tables,
        seq_lens,
        None if scales is None else scales.k,
        None if scales is None else scales.v,
        out,
        log2_sums,
        float(scale),
        float(soft_cap or 0.0),
        window or 0,
        skipped_tokens,
        q.stride(0),
        block_tables.stride(0),
        num_splits,
        1 if log2_sums is None else log2_sums.shape[2],
        first_part,
        NUM_KV_HEADS=G,
        GROUP=H // G,
        HEAD_TILE=head_tile,
        BLOCK_SIZE=S,
        HEAD_DIM=D,
        DIM_TILE=triton.next_power_of_2(D),
        TILE=tile.tokens,
        SCALE_STRIDE=0 if scales is None or scales.k.shape[0] == 1 else 1,
        FORMAT=form,
        SOFT_CAPPED=soft_cap is not None,
        # The interpreter multiplies bf16 tiles as if their bits were integers.
        DOT=tl.float32 if target.interpreted else None,
        PRECISION=target.fp32_products,
        num_warps=tile.num_warps,
        enable_fp_fusion=True,
        num_stages=tile.num_stages,
    )


@triton.jit
def _paged_decode(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_tables_ptr,
    seq_lens_ptr,
    k_scale_ptr,
    v_scale_ptr,
    out_ptr,
    log2_sums_ptr,
    scale,
    soft_cap,
    window,
    skipped_tokens,
    q_stride,
    table_stride,
    num_splits,
    num_parts,
    first_part,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_TILE: tl.constexpr,
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
    """One program per (split, key/value head, request), for the GROUP query heads that share it.

    Tiles: q, acc [HEAD_TILE, D]; k, v [TILE, D]; scores [HEAD_TILE, TILE]; best, total [HEAD_TILE].
    """
    split = tl.program_id(0)
    request = tl.program_id(2).to(tl.int64)
    TILES_PER_GROUP: tl.constexpr = (GROUP + HEAD_TILE - 1) // HEAD_TILE
    kv_head = tl.program_id(1) // TILES_PER_GROUP
    member = tl.program_id(1) % TILES_PER_GROUP * HEAD_TILE + tl.arange(0, HEAD_TILE)
    head = kv_head * GROUP + member
    dim = tl.arange(0, DIM_TILE)
    real = (member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty if DOT is None else DOT

    # Splits start on tile borders, so that a tile never straddles blocks it need not.
    seq_len = tl.load(seq_lens_ptr + request)
    first_seen = skipped_tokens
    if window > 0:
        first_seen = tl.maximum(first_seen, seq_len - window)
    base = first_seen // TILE * TILE
    share = tl.cdiv(tl.cdiv(tl.maximum(seq_len - base, 0), num_splits), TILE) * TILE
    start = base + split * share
    end = tl.minimum(start + share, seq_len)

    q_offset = request * q_stride + (head * HEAD_DIM)[:, None] + dim[None, :]
    q = tl.load(q_ptr + q_offset, real, 0.0).to(DTYPE)
    if k_scale_ptr is not None:
        scale *= tl.load(k_scale_ptr + kv_head * SCALE_STRIDE)
    best, total = tl.full([HEAD_TILE], float("-inf"), tl.float32), tl.zeros([HEAD_TILE], tl.float32)
    acc = tl.zeros([HEAD_TILE, DIM_TILE], tl.float32)
    table_ptr = block_tables_ptr + request * table_stride
    block = blocks_of_tile(table_ptr, start, first_seen, end, BLOCK_SIZE, TILE)
    for first in range(start, end, TILE):
        position = first + tl.arange(0, TILE)
        slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        kv_offset = (slot * (NUM_KV_HEADS * HEAD_DIM))[:, None] + kv_head * HEAD_DIM + dim[None, :]
        seen = (position >= first_seen) & (position < end)
        # Unseen slots may hold NaN, and 0 * NaN is NaN: they are not loaded.
        loaded = seen[:, None] & (dim < HEAD_DIM)[None, :]
        k = dequantise(tl.load(k_cache_ptr + kv_offset, loaded, 0.0), FORMAT, DTYPE)
        v = dequantise(tl.load(v_cache_ptr + kv_offset, loaded, 0.0), FORMAT, DTYPE)
        # The next tile's blocks are fetched while this one is worked on.
        block = blocks_of_tile(table_ptr, first + TILE, first_seen, end, BLOCK_SIZE, TILE)

        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        scores = to_log2_scores(scores, scale, soft_cap, SOFT_CAPPED)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        weights, shrink, best, total = online_softmax(scores, best, total)
        acc = tl.dot(weights.to(DTYPE), v, acc * shrink[:, None], input_precision=PRECISION)

    out = normalise(acc, total)
    if v_scale_ptr is not None:
        out *= tl.load(v_scale_ptr + kv_head * SCALE_STRIDE)
    row = request * (NUM_KV_HEADS * GROUP) + head
    if log2_sums_ptr is None:
        tl.store(
            out_ptr + (row * HEAD_DIM)[:, None] + dim[None, :],
            out.to(out_ptr.dtype.element_ty),
            real,
        )
    else:
        part = row * num_parts + first_part + split
        tl.store(log2_sums_ptr + part, log2_sum(best, total), member < GROUP)
        # An empty part is known by its sum.
        filled = (member < GROUP)[:, None] & (dim < tl.where(start < end, HEAD_DIM, 0))[None, :]
        tl.store(out_ptr + (part * HEAD_DIM)[:, None] + dim[None, :], out, filled)
