"""Keys and values land in their slots and nowhere else, fp8 in the same bits on every machine."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.checks import FP8, Scales, check_scale_values
from kernels.reference_attention import quantise
from kernels.store_kv import store_kv
from paged_cases import DEVICE, NAN

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@settings(max_examples=25)
@given(
    num_tokens=st.integers(0, 9),
    kv_heads=st.sampled_from([1, 2, 3, 5]),
    head_dim=st.sampled_from([64, 80, 112]),
    block_size=st.sampled_from([8, 16]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    fp8=st.sampled_from([None, E4M3, E5M2]),
    scaled=st.sampled_from(["none", "tensor", "head"]),
    data=st.data(),
)
def test_each_token_is_written_to_its_slot_and_nothing_else_is(
    num_tokens: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    fp8: torch.dtype | None,
    scaled: str,
    data: st.DataObject,
) -> None:
    kv_dtype = fp8 or dtype
    slots = data.draw(st.lists(st.integers(0, 31), min_size=num_tokens, max_size=num_tokens,
                               unique=True))  # fmt: skip
    padded = data.draw(st.sets(st.sampled_from(range(num_tokens)) if num_tokens else st.nothing()))
    mapping = torch.tensor([-1 if i in padded else s for i, s in enumerate(slots)]).long()
    # As a worker has them: slices of the rows that the projection of a layer gives.
    qkv = torch.randn(num_tokens, 3 * kv_heads, head_dim).to(dtype) * 3
    k, v = qkv[:, kv_heads : 2 * kv_heads], qkv[:, 2 * kv_heads :]
    scales = None
    if fp8 and scaled != "none":
        count = 1 if scaled == "tensor" else kv_heads
        scales = Scales(torch.rand(count) + 0.1, torch.rand(count) + 0.1)
    caches = [torch.full((32 // block_size, block_size, kv_heads, head_dim), NAN) for _ in "kv"]
    k_cache, v_cache = (cache.to(kv_dtype) for cache in caches)
    wanted_k, wanted_v = k_cache.clone(), v_cache.clone()
    for token, slot in enumerate(mapping.tolist()):
        if slot >= 0:
            for wanted, x, s in ((wanted_k, k, "k"), (wanted_v, v, "v")):
                scale = None if scales is None else getattr(scales, s)
                wanted.view(-1, kv_heads, head_dim)[slot] = quantise(x[token], scale, kv_dtype)
    k_cache, v_cache = k_cache.to(DEVICE), v_cache.to(DEVICE)
    on_device = None if scales is None else Scales(scales.k.to(DEVICE), scales.v.to(DEVICE))
    store_kv(k.to(DEVICE), v.to(DEVICE), k_cache, v_cache, mapping.to(DEVICE), on_device)
    assert torch.equal(bits(k_cache.cpu()), bits(wanted_k))
    assert torch.equal(bits(v_cache.cpu()), bits(wanted_v))


def stored(x: torch.Tensor, kv_dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """Return what a cache holds after `x`, any fp32 numbers, was written to it."""
    rows = torch.nn.functional.pad(x, (0, -len(x) % 64)).view(-1, 1, 64).to(DEVICE)
    cache = torch.zeros(-(-len(rows) // 8), 8, 1, 64, dtype=kv_dtype, device=DEVICE)
    scales = Scales(*(torch.tensor([float(scale)], device=DEVICE) for _ in "kv"))
    store_kv(rows, rows, cache, cache.clone(), torch.arange(len(rows), device=DEVICE), scales)
    return cache.view(-1)[: len(x)].cpu()


@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2])
def test_every_fp8_number_its_ties_and_its_neighbours_round_as_in_torch(
    kv_dtype: torch.dtype,
) -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(kv_dtype).float()
    numbers = numbers[numbers.isfinite()].sort().values
    ties = (numbers[1:] + numbers[:-1]) / 2
    x = torch.cat([numbers, ties])
    infinity = torch.tensor(math.inf)
    x = torch.cat([x, x.nextafter(infinity), x.nextafter(-infinity), torch.randn(500) * 1e3,
                   torch.tensor([math.inf, -math.inf, 1e30, -1e30, 1e-40, NAN])])  # fmt: skip
    assert torch.equal(bits(stored(x, kv_dtype)), bits(quantise(x, None, kv_dtype)))


def test_case_e05_values_are_divided_by_the_scale_rounded_to_even_and_clamped() -> None:
    table = [  # value, scale, stored, read back
        (1000, 1, 448, 448), (-1000, 1, -448, -448), (460, 1, 448, 448), (0.3, 1, 0.3125, 0.3125),
        (17, 1, 16, 16), (19, 1, 20, 20), (0.001, 1, 0.001953125, 0.001953125), (0.0009, 1, 0, 0),
        (1000, 4, 256, 1024), (3.3, 0.1, 32, 3.2), (-7.7, 0.25, -30, -7.5),
    ]  # fmt: skip
    for value, scale, held, read in table:
        got = stored(torch.tensor([float(value)]), E4M3, scale).float().item()
        assert got == held
        assert got * scale == pytest.approx(read, rel=1e-6)
    assert stored(torch.tensor([NAN]), E4M3).float().isnan().all()


@pytest.mark.parametrize("scale", [0.0, -1.0, NAN, math.inf])
def test_case_e05_bad_scales_are_refused(scale: float) -> None:
    good = torch.ones(2)
    with pytest.raises(ValueError, match="must be positive and finite"):
        check_scale_values(Scales(good, torch.tensor([1.0, scale])))
    check_scale_values(Scales(good, good))


@pytest.mark.parametrize("kv_dtype", list(FP8))
def test_reading_bytes_gives_every_fp8_number_exactly(kv_dtype: torch.dtype) -> None:
    from kernels.paged_decode import paged_decode

    # One token is attended to with weight 1: the output is its value.
    every = torch.arange(256, dtype=torch.uint8).view(kv_dtype)
    every = torch.where(every.float().isfinite(), every.float(), torch.zeros(())).to(kv_dtype)
    v_cache = torch.zeros(4, 8, 1, 64, dtype=kv_dtype)
    v_cache[:, 0, 0] = every.view(4, 64)
    v_cache = v_cache.to(DEVICE)
    out = paged_decode(
        torch.zeros(4, 1, 64, device=DEVICE),
        torch.zeros_like(v_cache),
        v_cache,
        torch.arange(4, dtype=torch.int32, device=DEVICE)[:, None],
        torch.ones(4, dtype=torch.int32, device=DEVICE),
        1.0,
        1,
    )
    assert torch.equal(out.view(4, 64).cpu(), every.float().view(4, 64))


def test_claims_of_the_docstring_are_checked() -> None:
    k = torch.zeros(2, 1, 64, device=DEVICE)
    cache = torch.zeros(1, 8, 1, 64, device=DEVICE)
    slots = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="must be int64"):
        store_kv(k, k, cache, cache, slots.int())
    with pytest.raises(ValueError, match="do not fit"):
        store_kv(k[:1], k[:1], cache, cache, slots)
    with pytest.raises(ValueError, match="or fp8"):
        store_kv(k, k, cache.half(), cache.half(), slots)
    other = torch.zeros(1, 8, 1, 72, device=DEVICE)
    with pytest.raises(ValueError, match="head_dim is 72"):
        store_kv(k, k, other, other, slots)
    other = torch.zeros(1, 12, 1, 64, device=DEVICE)
    with pytest.raises(ValueError, match="block_size is 12"):
        store_kv(k, k, other, other, slots)
    with pytest.raises(ValueError, match="scales are for fp8"):
        store_kv(k, k, cache, cache, slots, Scales(torch.ones(1), torch.ones(1)))
