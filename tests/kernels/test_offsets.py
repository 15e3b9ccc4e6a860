"""Offsets beyond 2**31 elements are right: the caches are really that large, only not touched."""

import numpy as np
import pytest
import torch

from kernels.cache_addresses import CacheAddresses
from kernels.copy_blocks import copy_blocks
from kernels.kept_weight import lay_out
from kernels.paged_attention_classic import paged_attention_classic
from kernels.paged_decode import paged_decode
from kernels.paged_prefill import paged_prefill
from kernels.quantised_matmul import quantised_matmul
from kernels.rotary import Store, rotary
from kernels.shared_prefix import shared_prefix
from kernels.store_kv import store_kv
from paged_cases import DEVICE

pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="needs memory that is not touched")

S, G, D = 128, 8, 128
FAR = 2**31 // (S * G * D) + 3
"""A block whose first element lies beyond 2**31."""


def huge_cache() -> torch.Tensor:
    """Return [N, S, G, D] fp16 zeros, 4 GiB of which no page exists until it is written."""
    return torch.from_numpy(np.zeros((FAR + 1, S, G, D), dtype=np.float16))


def test_a_block_beyond_two_to_the_31_is_written_read_and_copied() -> None:
    k_cache, v_cache = huge_cache(), huge_cache()
    tokens = 5
    q = torch.randn(tokens, G, D).half()
    k, v = (torch.randn(tokens, G, D).half() for _ in "kv")
    slots = FAR * S + torch.arange(tokens)
    assert int(slots[0]) * G * D > 2**31

    store_kv(k, v, k_cache, v_cache, slots)
    assert torch.equal(k_cache[FAR, :tokens], k)
    assert torch.equal(v_cache[FAR, :tokens], v)

    table = torch.tensor([[FAR]], dtype=torch.int32)
    length = torch.tensor([tokens], dtype=torch.int32)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.float().transpose(0, 1), k.float().transpose(0, 1), v.float().transpose(0, 1),
        is_causal=True, scale=0.1,
    ).transpose(0, 1)  # fmt: skip
    starts = torch.tensor([0, tokens], dtype=torch.int32)
    out = paged_prefill(q, k_cache, v_cache, table, length, starts, 0.1, tokens)
    torch.testing.assert_close(out.float(), expected, atol=2e-3, rtol=0)
    out = paged_decode(q[-1:], k_cache, v_cache, table, length, 0.1, tokens)
    torch.testing.assert_close(out.float(), expected[-1:], atol=2e-3, rtol=0)

    # A prefix of one whole block: unwritten slots hold zeros there.
    whole = torch.tensor([S], dtype=torch.int32)
    out = shared_prefix(q[:1], k_cache, v_cache, table[0], table, whole, 0.1, S)
    alone = paged_decode(q[:1], k_cache, v_cache, table, whole, 0.1, S)
    torch.testing.assert_close(out, alone, atol=2e-3, rtol=0)

    # The classic layout: one block's bytes, seen as that.
    classic_k = k_cache.view(FAR + 1, G, D // 8, S, 8)
    classic_v = v_cache.view(FAR + 1, G, D, S)
    classic_v[FAR] = v_cache[FAR].permute(1, 2, 0).clone()
    classic_k[FAR] = k_cache[FAR].view(S, G, D // 8, 8).permute(1, 2, 0, 3).clone()
    out = paged_attention_classic(q[-1:], classic_k, classic_v, table, length, 0.1)
    torch.testing.assert_close(out.float(), expected[-1:], atol=2e-3, rtol=0)

    cos, sin = torch.ones(tokens, D // 2), torch.zeros(tokens, D // 2)
    rotary(q, k, cos, sin, Store(v, k_cache, v_cache, slots))
    assert torch.equal(k_cache[FAR, :tokens], k)

    copy_blocks(CacheAddresses.of([k_cache, v_cache]), torch.tensor([FAR]), torch.tensor([1]))
    assert torch.equal(k_cache[1], k_cache[FAR])
    assert torch.equal(v_cache[1], v_cache[FAR])


def test_a_product_reads_and_writes_tokens_beyond_two_to_the_31() -> None:
    x, out = (
        torch.from_numpy(np.zeros(2**31 + 64, dtype=np.float16)).as_strided((2, size), (2**31, 1))
        for size in (32, 8)
    )
    x.copy_(torch.randn(2, 32))
    values = torch.randint(0, 16, (8, 32), dtype=torch.uint8)
    weight = lay_out("int4", values, torch.ones(8, 1), torch.full((8, 1), 8.0))
    quantised_matmul(x, weight, out=out)
    expected = x.float() @ (values.float() - 8).T
    torch.testing.assert_close(out.float(), expected, rtol=2e-3, atol=2e-2)
