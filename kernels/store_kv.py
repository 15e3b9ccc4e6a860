"""Writing new keys and values into their slots."""

import torch
import triton
import triton.language as tl

from kernels.checks import FP8, Scales, as_loaded, check_cache, check_device, check_rows
from kernels.fp8 import quantise
from kernels.tuned import target_of


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scales: Scales | None = None,
) -> None:
    """Write each token's key and value into its slot. A slot of -1 writes nothing.

    Shapes:
        k, v              [T, G, D]     fp16, bf16 or fp32; each token contiguous
        k_cache, v_cache  [N, S, G, D]  dtype of k, or fp8; contiguous, written in place
        slot_mapping      [T]           int64, block id * S + offset, or -1; no slot twice
        scales            what fp8 values are divided by; 1 if not given

    Raises: ValueError if a shape, layout or dtype is not as above. Slots are not read.
    Numerics: fp8 is value / scale in fp32, rounded to nearest even, clamped to the largest
        finite number; NaN stays NaN. The same bits on every GPU.
    Cost: reads 2 * T * G * D elements and writes as many; bound by memory.
    """
    check_cache(k_cache, v_cache, k.dtype, scales)
    G, D = k_cache.shape[2:]
    T = slot_mapping.shape[0]
    if k.shape != (T, G, D) or v.shape != k.shape or v.dtype != k.dtype:
        raise ValueError(
            f"k {list(k.shape)} {k.dtype} and v {list(v.shape)} {v.dtype} do not fit {T} slots of "
            f"a cache of {list(k_cache.shape)}"
        )
    if slot_mapping.dtype != torch.int64:
        raise ValueError(f"slot_mapping is {slot_mapping.dtype}, must be int64")
    check_rows("k", k)
    check_rows("v", v)
    check_device(k, v=v, k_cache=k_cache, v_cache=v_cache, slot_mapping=slot_mapping)
    if T == 0:
        return
    form = FP8.get(k_cache.dtype, "plain")
    tile = min(triton.next_power_of_2(G * D), 2048)
    _store_kv[(T,)](
        k,
        v,
        as_loaded(k_cache, form),
        as_loaded(v_cache, form),
        slot_mapping,
        None if scales is None else scales.k,
        None if scales is None else scales.v,
        k.stride(0),
        v.stride(0),
        NUM_ELEMENTS=G * D,
        TILE=tile,
        HEAD_DIM=D,
        SCALE_STRIDE=0 if scales is None or scales.k.shape[0] == 1 else 1,
        FORMAT=form,
        # Eight elements to a thread: 16 bytes of bf16.
        num_warps=max(1, tile // 8 // target_of(k.device).warp_size),
        enable_fp_fusion=True,
    )


@triton.jit
def _store_kv(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slot_mapping_ptr,
    k_scale_ptr,
    v_scale_ptr,
    k_stride,
    v_stride,
    NUM_ELEMENTS: tl.constexpr,
    TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """One program per token, which moves all its heads. Tiles: k, v [TILE] of G * D."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    if slot < 0:
        return

    for start in tl.static_range(0, NUM_ELEMENTS, TILE):
        element = start + tl.arange(0, TILE)
        inside = element < NUM_ELEMENTS
        k = tl.load(k_ptr + token * k_stride + element, inside)
        v = tl.load(v_ptr + token * v_stride + element, inside)
        if k_scale_ptr is None:
            k_scale, v_scale = 1.0, 1.0
        else:
            head = element // HEAD_DIM * SCALE_STRIDE
            k_scale = tl.load(k_scale_ptr + head, inside, 1.0)
            v_scale = tl.load(v_scale_ptr + head, inside, 1.0)

        to = slot * NUM_ELEMENTS + element
        k_out = quantise(k, k_scale, FORMAT, k_cache_ptr.dtype.element_ty)
        v_out = quantise(v, v_scale, FORMAT, v_cache_ptr.dtype.element_ty)
        tl.store(k_cache_ptr + to, k_out, inside)
        tl.store(v_cache_ptr + to, v_out, inside)
