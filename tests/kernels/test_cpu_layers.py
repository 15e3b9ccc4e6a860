"""What stands around attention on a CPU agrees with its references, for every width of vectors."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import cpu_layers
from kernels import reference_layers as reference
from kernels.cache_layout import to_lanes, to_rows
from kernels.checks import Scales, Store
from kernels.reference_attention import quantise
from native_variants import variant, variants
from paged_cases import NAN, assert_rounded_once

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
UNIT = {torch.float32: 0.0, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


@variants
@settings(max_examples=25)
@given(
    tokens=st.integers(0, 4),
    heads=st.sampled_from([(4, 2), (5, 1), (9, 3)]),
    head_dim=st.sampled_from([8, 24, 64, 80, 128]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    kv=st.sampled_from(["in place", "stored", "e4m3", "e5m2"]),
    per_head=st.booleans(),
    lanes=st.booleans(),
    seed=st.integers(0, 100),
)
def test_rotary_rotates_queries_and_stores_rotated_keys(
    name: str, tokens: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype, kv: str,
    seed: int, *, per_head: bool, lanes: bool,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    H, G = heads
    qkv = torch.randn(tokens, H + 2 * G, head_dim).to(dtype)
    q, k, v = qkv[:, :H], qkv[:, H : H + G], qkv[:, H + G :]
    angles = torch.rand(tokens, head_dim // 2) * 100
    cos, sin = angles.cos(), angles.sin()
    wanted_q, wanted_k, old_k = reference.rotary(q, cos, sin), reference.rotary(k, cos, sin), +k
    if kv == "in place":
        cpu_layers.rotary(q, k, cos, sin, code=variant(name))
        assert_rounded_once(k, wanted_k)
        assert_rounded_once(q, wanted_q)
        return
    kv_dtype = {"stored": dtype, "e4m3": E4M3, "e5m2": E5M2}[kv]
    scales = None
    if kv != "stored":
        scales = Scales(*(torch.rand(G if per_head else 1) + 0.5 for _ in "kv"))
    slots = torch.randperm(64)[:tokens]
    slots[1:2] = -1
    k_cache, v_cache = (torch.full((2, 32, G, head_dim), 3.0).to(kv_dtype) for _ in "kv")
    if lanes:
        k_cache, v_cache = to_lanes(k_cache, v_cache)
    store = Store(v, k_cache, v_cache, slots, scales)
    cpu_layers.rotary(q, k, cos, sin, store, code=variant(name))
    assert torch.equal(k, old_k)
    assert_rounded_once(q, wanted_q)
    stored, written = slots >= 0, slots[slots >= 0]
    caches = to_rows(k_cache, v_cache)
    keys, values = (cache.view(64, G, head_dim).float() for cache in caches)
    exact = quantise(v, None if scales is None else scales.v, kv_dtype).float()
    assert torch.equal(values[written], exact[stored])
    exact = quantise(wanted_k, None if scales is None else scales.k, kv_dtype).float()
    # fp32 noise before rounding may tip a tie: one unit of the type.
    unit = 0.26 if kv != "stored" else UNIT[dtype] + 1e-6
    torch.testing.assert_close(keys[written], exact[stored], rtol=unit, atol=2.0**-9)
    untouched = torch.ones(64, dtype=torch.bool)
    untouched[written] = False
    assert (keys[untouched] == 3.0).all()
    assert (values[untouched] == 3.0).all()


@variants
@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2])
def test_every_tie_and_special_value_is_stored_as_torch_stores_it(
    name: str, kv_dtype: torch.dtype
) -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(kv_dtype).float()
    numbers = torch.tensor(sorted(set(numbers[numbers.isfinite()].tolist())))
    ties = (numbers[1:] + numbers[:-1]) / 2
    near = torch.cat([ties.nextafter(torch.tensor(side)) for side in (-1e9, 1e9)])
    extreme = torch.tensor([NAN, torch.inf, -torch.inf, 1e9, -1e9, 1e-12, -0.0])
    v = torch.cat([numbers, ties, near, extreme])
    v = torch.nn.functional.pad(v, (0, -len(v) % 8)).view(1, 1, -1)
    shape = (1, 1, 1, v.shape[2])
    k_cache, v_cache = (torch.zeros(shape).to(kv_dtype) for _ in "kv")
    angles = torch.zeros(1, v.shape[2] // 2)
    slots = torch.zeros(1, dtype=torch.int64)
    cpu_layers.rotary(v.clone(), v, angles.cos(), angles, Store(v, k_cache, v_cache, slots),
                      code=variant(name))  # fmt: skip
    expected = quantise(v, None, kv_dtype).view(torch.uint8).flatten()
    found, nan = v_cache.view(torch.uint8).flatten(), v.flatten().isnan()
    assert torch.equal(found[~nan], expected[~nan])
    assert v_cache.float().flatten()[nan].isnan().all()


@variants
@pytest.mark.parametrize("tokens", [0, 1, 700])  # by several threads
def test_turns_are_cosines_and_sines_of_angles_in_fp32(name: str, tokens: int) -> None:
    torch.manual_seed(1)
    positions = torch.randint(0, 1 << 17, (tokens,))
    frequencies = 10000.0 ** -torch.linspace(0, 1, 40)
    angles = (positions[:, None].float() * frequencies).double()
    cos, sin = cpu_layers.turns(positions, frequencies, code=variant(name))
    torch.testing.assert_close(cos, angles.cos().float(), rtol=0, atol=2**-23)
    torch.testing.assert_close(sin, angles.sin().float(), rtol=0, atol=2**-23)


def test_turns_of_what_is_none_are_refused() -> None:
    frequencies = torch.ones(8)
    with pytest.raises(ValueError, match="positions is"):
        cpu_layers.turns(torch.zeros(3, dtype=torch.int32), frequencies)
    with pytest.raises(ValueError, match="frequencies is"):
        cpu_layers.turns(torch.zeros(3, dtype=torch.int64), frequencies.double())


@variants
@settings(max_examples=20)
@given(
    tokens=st.integers(0, 4),
    size=st.sampled_from([1, 64, 200, 576]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    with_residual=st.booleans(),
)
def test_norm_and_activation(
    name: str, tokens: int, size: int, dtype: torch.dtype, *, with_residual: bool
) -> None:
    x, residual = (torch.randn(tokens, size).to(dtype) for _ in "xr")
    weight = torch.randn(size).to(dtype)
    total = x.float() + residual.float()
    out = torch.full(x.shape, NAN).to(dtype)
    given_residual = residual if with_residual else None
    cpu_layers.rms_norm(x, weight, 1e-5, given_residual, out, code=variant(name))
    if with_residual:
        assert_rounded_once(residual, total)
    normed = residual.float() if with_residual else x.float()
    assert_rounded_once(out, reference.rms_norm(normed, weight, 1e-5))
    gate_up = torch.cat((x, residual), dim=1) * 4
    out = torch.full(x.shape, NAN).to(dtype)
    cpu_layers.silu_and_mul(gate_up, out, code=variant(name))
    assert_rounded_once(out, reference.silu_and_mul(gate_up))
    # Far to the left a gelu is the difference of numbers next to 1, in torch.
    bounded = gate_up.clamp(-4, 40)
    cpu_layers.gelu_and_mul(bounded, out, code=variant(name))
    assert_rounded_once(out, reference.gelu_and_mul(bounded))


@variants
@settings(max_examples=20)
@given(
    st.integers(0, 2 * 16384 + 40), st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
)
def test_widened_numbers_are_the_same_numbers(name: str, count: int, dtype: torch.dtype) -> None:
    x = torch.randn(count).to(dtype)
    x[: count // 4 : 3], x[1 : count // 4 : 3] = -torch.inf, torch.nan
    widened = cpu_layers.widen(x, code=variant(name))
    torch.testing.assert_close(widened, x.float(), rtol=0, atol=0, equal_nan=True)


@variants
@settings(max_examples=20)
@given(
    tokens=st.integers(0, 4),
    shape=st.sampled_from([(1, 8), (3, 64), (5, 100), (2, 256)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_heads_are_normalised_where_they_are(
    name: str, tokens: int, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    num_heads, head_dim = shape
    wide, weight = torch.randn(tokens, num_heads + 2, head_dim), torch.randn(shape).to(dtype)
    wide = wide.to(dtype)
    before, heads = wide.clone(), wide[:, 1:-1]
    expected = reference.norm_heads(heads, weight, 1e-5)
    cpu_layers.norm_heads(heads, weight, 1e-5, code=variant(name))
    assert_rounded_once(heads, expected)
    assert torch.equal(wide[:, 0], before[:, 0])
    assert torch.equal(wide[:, -1], before[:, -1])
