"""Rotary position embedding of queries and keys, which stores the keys and values on the way."""

import torch
import triton
import triton.language as tl

from kernels import cpu_layers
from kernels.checks import (
    ACTIVATIONS,
    FP8,
    Store,
    as_loaded,
    check_contiguous,
    check_device,
    check_head_dim,
    check_rows,
    check_store,
)
from kernels.cpu_build import runs_natively
from kernels.fp8 import quantise

__all__ = ["Store", "rotary"]


def rotary(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    store: Store | None = None,
) -> None:
    """Rotate q and k in place; with `store`, write k and v into their slots in the same launch.

    Elements i and i + D / 2 of a head are a pair, turned by the token's i-th angle. With `store`,
    k itself is left as it was: nothing reads it but through the cache.

    Shapes:
        q         [T, H, D]    fp16, bf16 or fp32; each token contiguous, rotated in place
        k         [T, G, D]    dtype of q; each token contiguous
        cos, sin  [T, D / 2]   fp32, contiguous

    Raises: ValueError if a shape, layout or dtype is not as above. Slots are not read.
    Numerics: in fp32, rounded once; an fp8 cache is quantised from the fp32 value.
    Cost: reads and writes T * (H + G) * D elements, and v where stored; bound by memory.
    Source: Su et al. 2021 (arXiv:2104.09864), pairs as in transformers.
    """
    if runs_natively(q.device):
        return cpu_layers.rotary(q, k, cos, sin, store)
    T, H, D = q.shape
    G = k.shape[1]
    check_head_dim(D)
    if k.shape != (T, G, D) or k.dtype != q.dtype or q.dtype not in ACTIVATIONS:
        raise ValueError(f"q {list(q.shape)} {q.dtype} and k {list(k.shape)} {k.dtype} disagree")
    for name, table in (("cos", cos), ("sin", sin)):
        if table.shape != (T, D // 2) or table.dtype != torch.float32:
            raise ValueError(
                f"{name} is {list(table.shape)} {table.dtype}, must be [{T}, {D // 2}] float32"
            )
    check_rows("q", q)
    check_rows("k", k)
    check_contiguous(cos=cos, sin=sin)
    check_device(q, k=k, cos=cos, sin=sin)
    if store is not None:
        check_store(store, k)
    if T == 0:
        return None
    form = "plain" if store is None else FP8.get(store.k_cache.dtype, "plain")
    scales = None if store is None else store.scales
    heads = min(8, triton.next_power_of_2(max(H, G)))
    _rotary[(T, triton.cdiv(H, heads) + triton.cdiv(G, heads))](
        q,
        k,
        None if store is None else store.v,
        cos,
        sin,
        None if store is None else as_loaded(store.k_cache, form),
        None if store is None else as_loaded(store.v_cache, form),
        None if store is None else store.slot_mapping,
        None if scales is None else scales.k,
        None if scales is None else scales.v,
        q.stride(0),
        k.stride(0),
        0 if store is None else store.v.stride(0),
        NUM_HEADS=H,
        NUM_KV_HEADS=G,
        HEAD_DIM=D,
        HALF_TILE=triton.next_power_of_2(D // 2),
        HEADS=heads,
        SCALE_STRIDE=0 if scales is None or scales.k.shape[0] == 1 else 1,
        FORMAT=form,
        num_warps=2,
        enable_fp_fusion=True,
    )
    return None


@triton.jit
def _rotary(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slot_mapping_ptr,
    k_scale_ptr,
    v_scale_ptr,
    q_stride,
    k_stride,
    v_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_TILE: tl.constexpr,
    HEADS: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """One program per (token, HEADS query heads or HEADS key/value heads).

    Tiles: low, high [HEADS, D / 2], the two halves of each head; cos, sin [D / 2].
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    QUERY_TILES: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    pair = tl.arange(0, HALF_TILE)
    cos = tl.load(cos_ptr + token * HALF + pair, pair < HALF, 0.0)[None, :]
    sin = tl.load(sin_ptr + token * HALF + pair, pair < HALF, 0.0)[None, :]

    if tile < QUERY_TILES:
        head = tile * HEADS + tl.arange(0, HEADS)
        inside = (head < NUM_HEADS)[:, None] & (pair < HALF)[None, :]
        at = q_ptr + token * q_stride + (head * HEAD_DIM)[:, None] + pair[None, :]
        low = tl.load(at, inside, 0.0).to(tl.float32)
        high = tl.load(at + HALF, inside, 0.0).to(tl.float32)
        tl.store(at, (low * cos - high * sin).to(q_ptr.dtype.element_ty), inside)
        tl.store(at + HALF, (high * cos + low * sin).to(q_ptr.dtype.element_ty), inside)
    else:
        head = (tile - QUERY_TILES) * HEADS + tl.arange(0, HEADS)
        inside = (head < NUM_KV_HEADS)[:, None] & (pair < HALF)[None, :]
        element = (head * HEAD_DIM)[:, None] + pair[None, :]
        at = k_ptr + token * k_stride + element
        low = tl.load(at, inside, 0.0).to(tl.float32)
        high = tl.load(at + HALF, inside, 0.0).to(tl.float32)
        k_low = low * cos - high * sin
        k_high = high * cos + low * sin
        if slot_mapping_ptr is None:
            tl.store(at, k_low.to(k_ptr.dtype.element_ty), inside)
            tl.store(at + HALF, k_high.to(k_ptr.dtype.element_ty), inside)
        else:
            slot = tl.load(slot_mapping_ptr + token)
            inside = inside & (slot >= 0 + tl.zeros_like(pair))[None, :]
            v_at = v_ptr + token * v_stride + element
            v_low = tl.load(v_at, inside, 0.0)
            v_high = tl.load(v_at + HALF, inside, 0.0)
            if k_scale_ptr is None:
                k_scale = 1.0
                v_scale = 1.0
            else:
                scaled_head = (head * SCALE_STRIDE)[:, None]
                k_scale = tl.load(k_scale_ptr + scaled_head, (head < NUM_KV_HEADS)[:, None], 1.0)
                v_scale = tl.load(v_scale_ptr + scaled_head, (head < NUM_KV_HEADS)[:, None], 1.0)
            KIND: tl.constexpr = k_cache_ptr.dtype.element_ty
            to = slot * (NUM_KV_HEADS * HEAD_DIM) + element
            tl.store(k_cache_ptr + to, quantise(k_low, k_scale, FORMAT, KIND), inside)
            tl.store(k_cache_ptr + to + HALF, quantise(k_high, k_scale, FORMAT, KIND), inside)
            tl.store(v_cache_ptr + to, quantise(v_low, v_scale, FORMAT, KIND), inside)
            tl.store(v_cache_ptr + to + HALF, quantise(v_high, v_scale, FORMAT, KIND), inside)
