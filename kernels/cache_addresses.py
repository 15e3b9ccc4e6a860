"""Where each layer's blocks lie, so that one launch can move a block in all layers."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.checks import check_contiguous, check_device


@dataclass(frozen=True, slots=True, eq=False)
class CacheAddresses:
    """The cache tensors of all layers, keys and values, as a kernel finds them.

    Built once, when the cache is: a launch then sends no addresses.
    """

    caches: tuple[torch.Tensor, ...]
    """[N, ...] each, of one shape and dtype. Held, since the addresses point into them."""

    addresses: torch.Tensor
    """[C] int64, on the caches' device."""

    block_bytes: int
    """Of one block in one cache. A multiple of 16."""

    @property
    def num_blocks(self) -> int:
        """Blocks in each cache."""
        return self.caches[0].shape[0]

    @staticmethod
    def of(caches: Sequence[torch.Tensor]) -> "CacheAddresses":
        """Look up the addresses of `caches`.

        Raises: ValueError if they are none, differ, are not contiguous, or their blocks or
            addresses are no multiple of 16 bytes.
        """
        if not caches:
            raise ValueError("there are no caches")
        first = caches[0]
        for number, cache in enumerate(caches):
            if cache.shape != first.shape or cache.dtype != first.dtype:
                raise ValueError(
                    f"cache {number} is {list(cache.shape)} {cache.dtype}, cache 0 "
                    f"{list(first.shape)} {first.dtype}"
                )
            check_contiguous(**{f"cache {number}": cache})
            check_device(first, **{f"cache {number}": cache})
            if cache.data_ptr() % 16:
                raise ValueError(f"cache {number} does not start at a multiple of 16 bytes")
        block_bytes = first[0].numel() * first.element_size()
        if block_bytes % 16:
            raise ValueError(f"a block has {block_bytes} bytes, must be a multiple of 16")
        addresses = torch.tensor([cache.data_ptr() for cache in caches], dtype=torch.int64)
        return CacheAddresses(tuple(caches), addresses.to(first.device), block_bytes)


def check_blocks(blocks: torch.Tensor, name: str, cache: CacheAddresses) -> None:
    """Raises: ValueError unless `blocks` is [P] int64, contiguous, where the caches are."""
    if blocks.dim() != 1 or blocks.dtype != torch.int64:
        raise ValueError(f"{name} is {list(blocks.shape)} {blocks.dtype}, must be [P] int64")
    check_contiguous(**{name: blocks})
    check_device(cache.addresses, **{name: blocks})


def check_staging(staging: torch.Tensor, blocks: torch.Tensor, cache: CacheAddresses) -> None:
    """Raises: ValueError unless `staging` has room for `blocks`, in all layers, side by side."""
    shape = (blocks.shape[0], len(cache.caches), cache.block_bytes)
    if staging.shape != shape or staging.dtype != torch.uint8:
        raise ValueError(
            f"staging is {list(staging.shape)} {staging.dtype}, must be {list(shape)} uint8"
        )
    check_contiguous(staging=staging)
    if staging.data_ptr() % 16:
        raise ValueError("staging does not start at a multiple of 16 bytes")


# Bytes that one program moves: 16 for each of 256 threads, four times.
SPAN_BYTES = 16384


@triton.jit
def block_of_cache(address, block, BLOCK_BYTES: tl.constexpr):
    """Return a pointer to the 4-byte words of a block in the cache at `address`."""
    words = address.to(tl.pointer_type(tl.int32))
    return tl.multiple_of(words, 16) + block * (BLOCK_BYTES // 4)


@triton.jit
def copy_span(src, dst, span, BLOCK_BYTES: tl.constexpr, SPAN_BYTES: tl.constexpr):
    """Copy one span of a block. Tiles: words [SPAN_BYTES / 4] int32, 16 bytes to a thread."""
    WORDS: tl.constexpr = SPAN_BYTES // 4
    word = span * WORDS + tl.arange(0, WORDS)
    inside = word < BLOCK_BYTES // 4
    tl.store(dst + word, tl.load(src + word, inside, 0), inside)
