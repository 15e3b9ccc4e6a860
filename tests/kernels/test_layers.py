"""The kernels around attention agree with their references, rounded once."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import reference_layers as reference
from kernels.adapter_runs import adapter_runs
from kernels.checks import Scales
from kernels.multi_lora import multi_lora
from kernels.paged_attention_classic import paged_attention_classic
from kernels.reference_attention import quantise
from kernels.rms_norm import rms_norm
from kernels.rotary import Store, rotary
from kernels.silu_and_mul import silu_and_mul
from paged_cases import DEVICE, NAN, assert_rounded_once, make_case, unwritten

dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
UNIT = {torch.float32: 1e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


@settings(max_examples=15)
@given(tokens=st.integers(0, 4), size=st.sampled_from([1, 64, 200, 576]), dtype=dtypes,
       with_residual=st.booleans())  # fmt: skip
def test_rms_norm(tokens: int, size: int, dtype: torch.dtype, *, with_residual: bool) -> None:
    x, residual = (torch.randn(tokens, size, device=DEVICE).to(dtype) for _ in "xr")
    weight = torch.randn(size, device=DEVICE).to(dtype)
    expected, total = x.float(), x.float() + residual.float()
    if with_residual:
        out = rms_norm(x, weight, 1e-5, residual, out=unwritten(x.shape, dtype))
        assert_rounded_once(residual, total)
        # What was rounded and written is what is normalised.
        expected = residual.float()
    else:
        out = rms_norm(x, weight, 1e-5, out=unwritten(x.shape, dtype))
    assert_rounded_once(out, reference.rms_norm(expected, weight, 1e-5))


@settings(max_examples=8)
@given(tokens=st.integers(0, 3), size=st.sampled_from([1, 100, 1536]), dtype=dtypes)
def test_silu_and_mul(tokens: int, size: int, dtype: torch.dtype) -> None:
    gate_up = (torch.randn(tokens, 2 * size, device=DEVICE) * 4).to(dtype)
    out = silu_and_mul(gate_up, out=unwritten((tokens, size), dtype))
    assert_rounded_once(out, reference.silu_and_mul(gate_up))


@settings(max_examples=15)
@given(
    tokens=st.integers(0, 4),
    heads=st.sampled_from([(4, 2), (5, 1), (9, 3), (12, 12)]),
    head_dim=st.sampled_from([64, 80, 128]),
    dtype=dtypes,
    kv=st.sampled_from(["in place", "stored", "e4m3", "e5m2"]),
    per_head=st.booleans(),
)
def test_rotary_rotates_queries_and_stores_rotated_keys(
    tokens: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype, kv: str, *,
    per_head: bool,
) -> None:  # fmt: skip
    H, G = heads
    qkv = torch.randn(tokens, H + 2 * G, head_dim, device=DEVICE).to(dtype)
    q, k, v = qkv[:, :H], qkv[:, H : H + G], qkv[:, H + G :]
    angles = torch.rand(tokens, head_dim // 2, device=DEVICE) * 100
    cos, sin = angles.cos(), angles.sin()
    wanted_q, wanted_k, old_k, old_v = (
        reference.rotary(q, cos, sin), reference.rotary(k, cos, sin), k.clone(), v.clone(),
    )  # fmt: skip
    if kv == "in place":
        rotary(q, k, cos, sin)
        assert_rounded_once(k, wanted_k)
    else:
        kv_dtype = {"stored": dtype, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[kv]
        scales = None
        if kv != "stored":
            count = G if per_head else 1
            scales = Scales(*(torch.rand(count, device=DEVICE) + 0.5 for _ in "kv"))
        slots = torch.randperm(16, device=DEVICE)[:tokens]
        slots[1:2] = -1
        k_cache, v_cache = (
            torch.full((2, 8, G, head_dim), 3.0, device=DEVICE).to(kv_dtype) for _ in "kv"
        )
        rotary(q, k, cos, sin, Store(v, k_cache, v_cache, slots, scales))
        assert torch.equal(k, old_k)
        written = slots[slots >= 0]
        keys, values = (cache.view(16, G, head_dim) for cache in (k_cache, v_cache))
        exact_v = quantise(old_v, None if scales is None else scales.v, kv_dtype)
        assert torch.equal(values[written].float(), exact_v[slots >= 0].float())
        if kv == "stored":
            assert_rounded_once(keys[written], wanted_k[slots >= 0])
        else:
            scale = None if scales is None else scales.k
            exact = quantise(wanted_k, scale, kv_dtype)[slots >= 0].float()
            # fp32 noise before rounding may tip a tie: one unit of the 8-bit type.
            torch.testing.assert_close(keys[written].float(), exact, rtol=0.26, atol=2.0**-9)
            assert (keys[written].float() == exact).float().mean() >= 0.99 or not tokens
        untouched = torch.ones(16, dtype=torch.bool, device=DEVICE)
        untouched[written] = False
        assert (keys[untouched].float() == 3.0).all()
        assert (values[untouched].float() == 3.0).all()
    assert_rounded_once(q, wanted_q)


@settings(max_examples=8)
@given(
    adapters=st.lists(st.integers(-1, 2), max_size=20),
    sizes=st.sampled_from([(64, 48, 8), (300, 130, 16), (128, 128, 5)]),
    dtype=dtypes,
)
def test_each_token_gets_its_own_adapter(
    adapters: list[int], sizes: tuple[int, int, int], dtype: torch.dtype
) -> None:
    E, O, rank = sizes  # noqa: E741
    T = len(adapters)
    token_adapters = torch.tensor(adapters, dtype=torch.int32, device=DEVICE)
    runs = adapter_runs(token_adapters, 3)
    x = torch.randn(T, E, device=DEVICE).to(dtype)
    a = (torch.randn(3, rank, E, device=DEVICE) / E**0.5).to(dtype)
    b = torch.randn(3, O, rank, device=DEVICE).to(dtype)
    scale = torch.tensor([0.5, 1.0, 2.0], device=DEVICE)
    y = torch.randn(T, O, device=DEVICE).to(dtype)
    before = y.clone()
    multi_lora(x, a, b, scale, runs, y)
    none = token_adapters < 0
    assert torch.equal(y[none], before[none])
    added = reference.multi_lora(x, a, b, scale, runs)
    # x @ a.T is rounded on the way, here and there: each of its `rank` terms may differ by a unit.
    noise = UNIT[dtype] * float(added.abs().max() if T else 0.0) * 2 + 1e-5
    torch.testing.assert_close(y.float(), before.float() + added, rtol=UNIT[dtype], atol=noise)


@settings(max_examples=6)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    heads=st.sampled_from([(4, 2), (5, 1), (3, 3)]),
    head_dim=st.sampled_from([64, 80, 256]),
    dtype=dtypes,
    soft_cap=st.sampled_from([None, 2.0]),
)
def test_the_classic_layout_gives_the_same_attention(
    lengths: list[int], heads: tuple[int, int], head_dim: int, dtype: torch.dtype,
    soft_cap: float | None,
) -> None:  # fmt: skip
    case = make_case([(length, 1) for length in lengths], heads=heads, head_dim=head_dim,
                     dtype=dtype, soft_cap=soft_cap)  # fmt: skip
    k_cache, v_cache = reference.to_classic(case.k_cache, case.v_cache)
    assert k_cache.isnan().any()
    out = unwritten(case.q.shape, dtype)
    paged_attention_classic(case.q, k_cache, v_cache, case.block_tables, case.seq_lens, case.scale,
                            soft_cap=soft_cap, out=out)  # fmt: skip
    case.assert_close(out)


def test_claims_of_the_docstrings_are_checked() -> None:
    x = torch.full((2, 64), NAN, device=DEVICE)
    with pytest.raises(ValueError, match="weight is \\[63\\]"):
        rms_norm(x, x[0, 1:], 1e-5)
    with pytest.raises(ValueError, match="residual is"):
        rms_norm(x, x[0], 1e-5, x[:1])
    with pytest.raises(ValueError, match="gate_up is \\[2, 63\\]"):
        silu_and_mul(x[:, 1:])
    q = x[:, None]
    with pytest.raises(ValueError, match="cos is"):
        rotary(q, q, x, x)
