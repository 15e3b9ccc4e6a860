"""Blocks move whole, in all layers, and nothing beside them changes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cache_addresses import CacheAddresses
from kernels.copy_blocks import copy_blocks
from kernels.gather_blocks import gather_blocks
from kernels.scatter_blocks import scatter_blocks
from paged_cases import DEVICE

N = 7


def make_caches(layers: int, heads: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.randn(N, 8, heads, 80).to(dtype).to(DEVICE) for _ in range(2 * layers)]


shapes = {
    "layers": st.integers(1, 3),
    "heads": st.sampled_from([1, 3, 8]),
    "dtype": st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn]),
}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@settings(max_examples=10)
@given(order=st.permutations(range(N)), pairs=st.integers(0, 3), **shapes)
def test_pairs_are_copied_in_every_layer(
    order: list[int], pairs: int, layers: int, heads: int, dtype: torch.dtype
) -> None:
    caches = make_caches(layers, heads, dtype)
    before = [cache.clone() for cache in caches]
    src, dst = order[:pairs], order[pairs : 2 * pairs]
    copy_blocks(
        CacheAddresses.of(caches),
        torch.tensor([*src, -1], dtype=torch.int64, device=DEVICE),
        torch.tensor([*dst, order[-1]], dtype=torch.int64, device=DEVICE),
    )
    for cache, old in zip(caches, before, strict=True):
        for s, d in zip(src, dst, strict=True):
            bits(old[d]).copy_(bits(old[s]))
        assert torch.equal(bits(cache), bits(old))


@settings(max_examples=10)
@given(order=st.permutations(range(N)), count=st.integers(1, 3), **shapes)
def test_scattered_blocks_are_what_was_gathered(
    order: list[int], count: int, layers: int, heads: int, dtype: torch.dtype
) -> None:
    caches = make_caches(layers, heads, dtype)
    before = [cache.clone() for cache in caches]
    addresses = CacheAddresses.of(caches)
    staging = torch.full((count + 1, len(caches), addresses.block_bytes), 7, dtype=torch.uint8)
    staging = staging.to(DEVICE)
    src, dst = order[:count], order[count : 2 * count]
    gather_blocks(addresses, torch.tensor([*src, -1], device=DEVICE), staging)
    for place, block in enumerate(src):
        for number, cache in enumerate(caches):
            assert torch.equal(staging[place, number], bits(cache[block]).flatten())
    assert (staging[count] == 7).all()
    scatter_blocks(addresses, torch.tensor([*dst, -1], device=DEVICE), staging)
    for cache, old in zip(caches, before, strict=True):
        for s, d in zip(src, dst, strict=True):
            bits(old[d]).copy_(bits(old[s]))
        assert torch.equal(bits(cache), bits(old))


def test_caches_that_differ_and_staging_that_does_not_fit_are_refused() -> None:
    caches = make_caches(1, 1, torch.float32)
    with pytest.raises(ValueError, match="cache 1 is"):
        CacheAddresses.of([caches[0], caches[1][:3]])
    with pytest.raises(ValueError, match="a block has 8 bytes"):
        CacheAddresses.of([torch.zeros(4, 2)])
    addresses = CacheAddresses.of(caches)
    blocks = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="staging is"):
        gather_blocks(addresses, blocks, torch.zeros(1, 2, 16, dtype=torch.uint8, device=DEVICE))
    with pytest.raises(ValueError, match="must be \\[P\\] int64"):
        copy_blocks(addresses, blocks.int(), blocks)
    with pytest.raises(ValueError, match="src has 1 blocks, dst 2"):
        copy_blocks(addresses, blocks, torch.zeros(2, dtype=torch.int64, device=DEVICE))
