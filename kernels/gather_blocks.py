"""Blocks from all layers into one contiguous buffer, to leave the device in one transfer."""

import torch
import triton
import triton.language as tl

from kernels.cache_addresses import (
    SPAN_BYTES,
    CacheAddresses,
    block_of_cache,
    check_blocks,
    check_staging,
    copy_span,
)


def gather_blocks(cache: CacheAddresses, blocks: torch.Tensor, staging: torch.Tensor) -> None:
    """Write block blocks[i] of every layer to staging[i], one layer behind the other.

    The bus moves megabytes at its full rate and kilobytes at a tenth of it: a block of one layer
    is tens of kilobytes, of all layers megabytes.

    Shapes:
        blocks   [P]                  int64, contiguous, on the caches' device; -1 writes nothing
        staging  [P, C, block_bytes]  uint8, contiguous; on the device, or pinned host memory that
                                      the device can address

    Raises: ValueError if a shape, layout or dtype is not as above. Ids are not read.
    Cost: reads and writes P * C * block_bytes.
    """
    check_blocks(blocks, "blocks", cache)
    check_staging(staging, blocks, cache)
    if blocks.shape[0] == 0:
        return
    span_bytes = min(SPAN_BYTES, triton.next_power_of_2(cache.block_bytes))
    C = len(cache.caches)
    _gather_blocks[(blocks.shape[0], C, triton.cdiv(cache.block_bytes, span_bytes))](
        cache.addresses,
        blocks,
        staging.view(torch.int32),
        NUM_CACHES=C,
        BLOCK_BYTES=cache.block_bytes,
        SPAN_BYTES=span_bytes,
        num_warps=8,
        enable_fp_fusion=True,
    )


@triton.jit
def _gather_blocks(
    addresses_ptr,
    blocks_ptr,
    staging_ptr,
    NUM_CACHES: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    SPAN_BYTES: tl.constexpr,
):
    """One program per (block, cache, span of the block)."""
    place = tl.program_id(0).to(tl.int64) * NUM_CACHES + tl.program_id(1)
    block = tl.load(blocks_ptr + tl.program_id(0))
    if block < 0:
        return
    address = tl.load(addresses_ptr + tl.program_id(1))

    src = block_of_cache(address, block, BLOCK_BYTES)
    dst = staging_ptr + place * (BLOCK_BYTES // 4)
    copy_span(src, dst, tl.program_id(2), BLOCK_BYTES, SPAN_BYTES)
