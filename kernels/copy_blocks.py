"""Copying blocks inside the cache: what copy-on-write costs."""

import torch
import triton
import triton.language as tl

from kernels.cache_addresses import (
    SPAN_BYTES,
    CacheAddresses,
    block_of_cache,
    check_blocks,
    copy_span,
)


def copy_blocks(cache: CacheAddresses, src: torch.Tensor, dst: torch.Tensor) -> None:
    """Copy block src[i] to block dst[i], for all i and in all layers, in one launch.

    Shapes: src, dst [P] int64, contiguous, on the caches' device. No block is in dst twice, nor
        in both: the order of the copies is not defined. -1 in either copies nothing.

    Raises: ValueError if a shape, layout or dtype is not as above. Ids are not read.
    Cost: reads and writes P * C * block_bytes; bound by memory.
    """
    check_blocks(src, "src", cache)
    check_blocks(dst, "dst", cache)
    if src.shape != dst.shape:
        raise ValueError(f"src has {src.shape[0]} blocks, dst {dst.shape[0]}")
    if src.shape[0] == 0:
        return
    span_bytes = min(SPAN_BYTES, triton.next_power_of_2(cache.block_bytes))
    _copy_blocks[(src.shape[0], len(cache.caches), triton.cdiv(cache.block_bytes, span_bytes))](
        cache.addresses,
        src,
        dst,
        BLOCK_BYTES=cache.block_bytes,
        SPAN_BYTES=span_bytes,
        num_warps=8,
        enable_fp_fusion=True,
    )


@triton.jit
def _copy_blocks(
    addresses_ptr, src_ptr, dst_ptr, BLOCK_BYTES: tl.constexpr, SPAN_BYTES: tl.constexpr
):
    """One program per (pair, cache, span of the block)."""
    src = tl.load(src_ptr + tl.program_id(0))
    dst = tl.load(dst_ptr + tl.program_id(0))
    if (src < 0) | (dst < 0):
        return
    address = tl.load(addresses_ptr + tl.program_id(1))

    copy_span(
        block_of_cache(address, src, BLOCK_BYTES),
        block_of_cache(address, dst, BLOCK_BYTES),
        tl.program_id(2),
        BLOCK_BYTES,
        SPAN_BYTES,
    )
