"""Decoding over the cache layout of the first PagedAttention kernel: here to teach, not to serve.

That CUDA kernel gives one *thread* one key. Its threads of a warp read 32 keys at once, and memory
is fast only if neighbours read neighbouring 16 bytes. So the layout cuts each key into pieces of
x = 16 / itemsize elements and puts the same piece of all keys of a block side by side:

    K  [N, G, D / x, S, x]     thread s reads piece d of key s: 16 bytes, next to thread s + 1's
    V  [N, G, D, S]            thread d reads element d of all S values: one row, 16 bytes at a time

A thread can then sum its whole score alone, without talking to its neighbours, and a dot product
needs no tensor cores. The price: every query head reads the keys again (no tile to share), stores
of one token scatter over D / x pieces, and a tensor core, which wants keys as rows of D elements,
cannot be fed. Once query heads share key/value heads, that price is the bill: docs/kernels.md.
"""

import torch
import triton
import triton.language as tl

from kernels.attention_math import to_log2_scores
from kernels.checks import (
    ACTIVATIONS,
    BLOCK_SIZES,
    check_attention_options,
    check_contiguous,
    check_device,
    check_head_dim,
    check_requests,
    check_rows,
)


def paged_attention_classic(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    *,
    soft_cap: float | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return what `paged_decode` does, from the classic layout, one program per query head.

    Shapes:
        q, out, returns  [R, H, D]            fp16, bf16 or fp32; each request's q contiguous
        k_cache          [N, G, D / x, S, x]  dtype of q, contiguous; x = 16 / bytes per element
        v_cache          [N, G, D, S]         dtype of q, contiguous
        block_tables     [R, B]               int32, rows contiguous; only the first
                                              ceil(seq_len / S) entries of a row are read
        seq_lens         [R]                  int32; 0 for an unused row, which gives 0

    Raises: ValueError if a shape, layout or dtype is not as above. Values are not read.
    Numerics: all in fp32, rounded once.
    Cost: reads 2 * seq_len * H * D elements per request: H / G times what `paged_decode` reads
        (from the L2 cache, where it is large enough). Not split over programs.
    Source: Kwon et al. 2023 (arXiv:2309.06180), section 5.1; vLLM's attention_kernels.cu.
    """
    R, H, D = q.shape
    check_head_dim(D)
    x = 16 // q.element_size()
    if q.dtype not in ACTIVATIONS or v_cache.dim() != 4 or v_cache.shape[2] != D:
        raise ValueError(f"q {list(q.shape)} {q.dtype} does not fit v_cache {list(v_cache.shape)}")
    N, G, _, S = v_cache.shape
    if k_cache.shape != (N, G, D // x, S, x) or H % G or S not in BLOCK_SIZES:
        raise ValueError(
            f"k_cache is {list(k_cache.shape)}, must be {[N, G, D // x, S, x]}, and "
            f"{H} query heads a multiple of {G}"
        )
    if not q.dtype == k_cache.dtype == v_cache.dtype:
        raise ValueError(f"q {q.dtype}, k_cache {k_cache.dtype}, v_cache {v_cache.dtype}: differ")
    check_requests(q, block_tables, seq_lens, R)
    check_attention_options(None, soft_cap)
    if out is None:
        out = torch.empty((R, H, D), dtype=q.dtype, device=q.device)
    check_rows("q", q)
    check_contiguous(k_cache=k_cache, v_cache=v_cache, out=out)
    check_device(q, k_cache=k_cache, v_cache=v_cache, out=out)
    if R == 0:
        return out
    _paged_attention_classic[(H, R)](
        q,
        k_cache,
        v_cache,
        block_tables,
        seq_lens,
        out,
        float(scale),
        float(soft_cap or 0.0),
        q.stride(0),
        block_tables.stride(0),
        NUM_HEADS=H,
        NUM_KV_HEADS=G,
        BLOCK_SIZE=S,
        HEAD_DIM=D,
        DIM_TILE=triton.next_power_of_2(D),
        PIECE=x,
        SOFT_CAPPED=soft_cap is not None,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return out


@triton.jit
def _paged_attention_classic(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_tables_ptr,
    seq_lens_ptr,
    out_ptr,
    scale,
    soft_cap,
    q_stride,
    table_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    PIECE: tl.constexpr,
    SOFT_CAPPED: tl.constexpr,
):
    """One program per (query head, request), which walks over the request's blocks.

    Tiles: q [D / x, 1, x]; k [D / x, S, x]; v [D, S]; scores, weights [S]; acc [D].
    """
    head = tl.program_id(0)
    request = tl.program_id(1).to(tl.int64)
    kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
    seq_len = tl.load(seq_lens_ptr + request)
    slot = tl.arange(0, BLOCK_SIZE)
    dim = tl.arange(0, DIM_TILE)
    piece = tl.arange(0, DIM_TILE // PIECE)[:, None, None]
    place = tl.arange(0, PIECE)[None, None, :]
    real = piece < HEAD_DIM // PIECE
    q_at = q_ptr + request * q_stride + head * HEAD_DIM + piece * PIECE + place
    q = tl.load(q_at, real, 0.0).to(tl.float32)

    best = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    acc = tl.zeros([DIM_TILE], tl.float32)
    for i in range(tl.cdiv(seq_len, BLOCK_SIZE)):
        block = tl.load(block_tables_ptr + request * table_stride + i).to(tl.int64)
        base = (block * NUM_KV_HEADS + kv_head) * (HEAD_DIM * BLOCK_SIZE)
        valid = i * BLOCK_SIZE + slot < seq_len
        # One thread per key: piece after piece, 16 bytes each, next to its neighbour's.
        k_at = base + (piece * BLOCK_SIZE + slot[None, :, None]) * PIECE + place
        k = tl.load(k_cache_ptr + k_at, real & valid[None, :, None], 0.0).to(tl.float32)
        scores = to_log2_scores(tl.sum(tl.sum(q * k, 2), 0), scale, soft_cap, SOFT_CAPPED)
        scores = tl.where(valid, scores, float("-inf"))

        new_best = tl.maximum(best, tl.max(scores, 0))
        shrink = tl.exp2(best - new_best)
        weights = tl.exp2(scores - new_best)
        total = total * shrink + tl.sum(weights, 0)
        best = new_best
        # One thread per element of the head: its values of the whole block in a row.
        v_at = base + dim[:, None] * BLOCK_SIZE + slot[None, :]
        inside = (dim < HEAD_DIM)[:, None] & valid[None, :]
        v = tl.load(v_cache_ptr + v_at, inside, 0.0).to(tl.float32)
        acc = acc * shrink + tl.sum(v * weights[None, :], 1)

    out = acc / tl.where(total == 0.0, 1.0, total)
    out_at = out_ptr + (request * NUM_HEADS + head) * HEAD_DIM + dim
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), dim < HEAD_DIM)
