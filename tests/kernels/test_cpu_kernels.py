"""Native code on a CPU agrees with its references, for every width of vectors it is built for."""

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commands import run as run_program
from kernels import cpu_layers
from kernels import reference_layers as reference
from kernels.cache_layout import LANES, layout, sizes, to_lanes, to_rows
from kernels.checks import Scales, Store
from kernels.cpu_attention import attend
from kernels.reference_attention import quantise
from native_variants import byte_variants, variant, variants
from paged_cases import HEADS, NAN, Case, assert_rounded_once, make_case
from source_tree import ROOT

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
UNIT = {torch.float32: 0.0, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def run(
    case: Case, name: str = "native", num_threads: int = 1, *, decode: bool, lanes: bool = False
) -> torch.Tensor:
    """Attend; with `lanes` to a cache in lanes, if its blocks allow it."""
    k_cache, v_cache = case.k_cache, case.v_cache
    if lanes and k_cache.shape[1] % LANES == 0:
        k_cache, v_cache = to_lanes(k_cache, v_cache)
    out = attend(
        case.q,
        k_cache,
        v_cache,
        case.block_tables,
        case.seq_lens,
        None if decode else case.query_start_loc,
        case.scale,
        window=case.window,
        soft_cap=case.soft_cap,
        scales=case.scales,
        out=torch.full(case.q.shape, NAN).to(case.q.dtype),
        num_threads=num_threads,
        code=variant(name),
    )
    assert not out.isnan().any()
    return out


def assert_close(case: Case, out: torch.Tensor) -> None:
    """Check for one rounding of the result, and half a unit for weights rounded to q's type."""
    exact = case.expected()
    unit = UNIT[out.dtype]
    # fp32 noise of sums over some hundred keys, in units of the largest value in sight.
    size = max(1.0, float(case.v_cache.float().nan_to_num().abs().max()))
    if case.scales is not None:
        size *= max(1.0, float(case.scales.v.max()))
    noise = (1e-5 + (unit / 2 if out.dtype == torch.bfloat16 else 0.0)) * size
    torch.testing.assert_close(out.float(), exact, rtol=unit, atol=noise)


@st.composite
def cases(draw: st.DrawFn, *, decode: bool) -> Case:
    block_size = draw(st.sampled_from([1, 3, 8, 16, 32, 48]))
    lengths = draw(st.lists(st.integers(0, 3 * block_size), min_size=1, max_size=4))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    new = [1 if decode else draw(st.integers(0, length)) for length in lengths]
    return make_case(
        list(zip(lengths, new, strict=True)),
        heads=draw(st.sampled_from([(4, 2), (5, 1), (7, 1), (3, 3), (12, 2), (48, 1)])),
        head_dim=draw(st.sampled_from([8, 24, 40, 64, 72, 80, 128, 136, 256])),
        block_size=block_size,
        dtype=dtype,
        kv_dtype=draw(st.sampled_from([dtype, dtype, E4M3, E5M2])),
        scales=draw(st.sampled_from(["none", "tensor", "head"])),
        window=draw(st.none() | st.integers(1, 40)),
        soft_cap=draw(st.none() | st.sampled_from([0.5, 30.0])),
        seed=draw(st.integers(0, 1000)),
    )


threads = st.integers(1, 3)


@variants
@settings(max_examples=60)
@given(case=cases(decode=True), num_threads=threads, lanes=st.booleans())
def test_decoding_of_any_batch_agrees_with_dense_attention(
    name: str, case: Case, num_threads: int, *, lanes: bool
) -> None:
    assert_close(case, run(case, name, num_threads, decode=True, lanes=lanes))


@variants
@settings(max_examples=60)
@given(case=cases(decode=False), num_threads=threads, lanes=st.booleans())
def test_prefill_of_any_mixed_batch_agrees_with_dense_attention(
    name: str, case: Case, num_threads: int, *, lanes: bool
) -> None:
    if case.q.shape[0]:
        assert_close(case, run(case, name, num_threads, decode=False, lanes=lanes))


@variants
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_long_sequences_of_many_tiles_agree_in_any_number_of_parts(
    name: str, dtype: torch.dtype
) -> None:
    lengths = [(700, 1), (0, 1), (33, 1), (1025, 1)]
    for block_size, window in ((7, None), (16, None), (32, 300), (64, None)):
        case = make_case(lengths, heads=(6, 2), block_size=block_size, head_dim=72, dtype=dtype,
                         window=window)  # fmt: skip
        for num_threads in (1, 2, 5):
            assert_close(case, run(case, name, num_threads, decode=True, lanes=True))
    chunk = make_case([(500, 300), (257, 1), (64, 64)], heads=(6, 2), head_dim=72, dtype=dtype)
    for lanes in (False, True):
        assert_close(chunk, run(chunk, name, 2, decode=False, lanes=lanes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, E4M3])
@given(groups=st.integers(1, 3), G=st.integers(1, 3), D=st.sampled_from([8, 24, 128]))
@settings(max_examples=10)
def test_both_layouts_hold_the_same_keys_and_values_where_they_say(
    dtype: torch.dtype, groups: int, G: int, D: int
) -> None:
    S = groups * LANES
    rows = [torch.randint(0, 256, (3, S, G, D * dtype.itemsize)).to(torch.uint8) for _ in "kv"]
    k, v = (cache.view(dtype) for cache in rows)
    in_lanes = to_lanes(k, v)
    form = layout(3, S, G, D, dtype, in_lanes=True)
    assert (in_lanes[0].shape, in_lanes[1].shape) == (form.k_shape, form.v_shape)
    assert sizes(in_lanes[0]) == (3, S, G, D)
    for mine, expected in zip(to_rows(*in_lanes), rows, strict=True):
        assert torch.equal(mine.view(torch.uint8), expected)
    N, slot, g, word = 2, S - 3, G - 1, D * dtype.itemsize // 4 - 1
    key = in_lanes[0].view(torch.uint8)[N, g, slot // LANES, word, slot % LANES]
    assert torch.equal(key, rows[0][N, slot, g, -4:])
    # A block lies in one piece, so that it is copied whole.
    assert torch.equal(to_rows(*(cache[1:2] for cache in in_lanes))[0].view(torch.uint8),
                       rows[0][1:2])  # fmt: skip


def test_blocks_that_are_no_multiple_of_sixteen_stay_in_rows() -> None:
    assert layout(9, 8, 2, 64, torch.bfloat16, in_lanes=True).k_shape == (9, 8, 2, 64)
    assert layout(9, 16, 2, 64, torch.bfloat16).k_shape == (9, 16, 2, 64)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 256])
def test_case_e04_every_ratio_and_head_size_agrees(heads: tuple[int, int], head_dim: int) -> None:
    lengths = [(length, 1) for length in (1, 15, 16, 17, 53)]
    case = make_case(lengths, heads=heads, head_dim=head_dim)
    torch.testing.assert_close(run(case, decode=True), case.expected(), atol=1e-5, rtol=0)
    case = make_case([(1, 1), (53, 20), (16, 16)], heads=heads, head_dim=head_dim)
    torch.testing.assert_close(run(case, decode=False), case.expected(), atol=1e-5, rtol=0)


@variants
@pytest.mark.parametrize("kv_dtype", [torch.float32, E4M3])
def test_case_e02_unused_slots_never_reach_the_result(name: str, kv_dtype: torch.dtype) -> None:
    for new in (1, 0):  # a token each, then all of them
        lengths = [(length, new or length) for length in (1, 5, 16, 17, 33)]
        poisoned = make_case(lengths, kv_dtype=kv_dtype, heads=(2, 2))
        clean = make_case(lengths, kv_dtype=kv_dtype, heads=(2, 2), filling=0.0)
        assert poisoned.k_cache.float().isnan().any()
        for lanes in (False, True):
            out = run(poisoned, name, decode=bool(new), lanes=lanes)
            assert torch.equal(out, run(clean, name, decode=bool(new), lanes=lanes))


@variants
@pytest.mark.parametrize("decode", [True, False])
def test_nan_in_a_key_or_value_in_sight_is_not_swallowed(name: str, *, decode: bool) -> None:
    # The worker fails a row by its logits: a NaN that became a number would be served as text.
    for dtype in (torch.float32, torch.bfloat16):
        for cache in ("k_cache", "v_cache"):
            case = make_case([(40, 1 if decode else 40)], dtype=dtype)
            getattr(case, cache)[case.block_tables[0, 0], 3] = NAN
            for caches in ((case.k_cache, case.v_cache), to_lanes(case.k_cache, case.v_cache)):
                out = attend(case.q, *caches, case.block_tables, case.seq_lens,
                             None if decode else case.query_start_loc, case.scale,
                             code=variant(name))  # fmt: skip
                assert out[-1].isnan().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2])
@byte_variants
def test_every_number_of_eight_bits_is_read_as_it_is(
    name: str, kv_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    """Of one token attention returns the value itself, and NaN only where it is NaN."""
    for D in (64, 72, 256):
        bits = torch.arange(256, dtype=torch.uint8)
        numbers = bits.roll(D)[: 256 // D * D].view(kv_dtype).view(-1, D)
        R = len(numbers)
        v_cache = numbers.view(R, 1, 1, D)
        tables = torch.arange(R, dtype=torch.int32)[:, None]
        lengths = torch.ones(R, dtype=torch.int32)
        q = torch.zeros(R, 3, D, dtype=dtype)
        out = attend(q, torch.zeros_like(v_cache), v_cache, tables, lengths, None, 1.0,
                     code=variant(name))  # fmt: skip
        expected = numbers.to(dtype)[:, None].expand(R, 3, D)
        assert torch.equal(out.isnan(), expected.isnan())
        assert torch.equal(out.nan_to_num(0, 1, -1), expected.nan_to_num(0, 1, -1))


@pytest.mark.parametrize("S", [2, 16])
@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2])
@byte_variants
def test_every_number_of_eight_bits_is_multiplied_as_it_is(
    name: str, kv_dtype: torch.dtype, S: int
) -> None:
    """The weight of a token, beside one with a score of 0, tells its score."""
    numbers = torch.arange(256, dtype=torch.uint8).view(kv_dtype)
    numbers = numbers[numbers.float().isfinite()][:192]
    for D in (8, 64, 192):
        keys = torch.zeros(192, S, 1, D).to(kv_dtype)
        places = torch.arange(192) % D
        keys[torch.arange(192), 0, 0, places] = numbers
        values = torch.zeros(192, S, 1, D).to(kv_dtype)
        values[:, 0] = 1.0
        if S == LANES:
            keys, values = to_lanes(keys, values)
        q = torch.ones(192, 3, D, dtype=torch.bfloat16)
        tables = torch.arange(192, dtype=torch.int32)[:, None]
        out = attend(q, keys, values, tables, torch.full((192,), 2, dtype=torch.int32), None, 1.0,
                     code=variant(name))  # fmt: skip
        expected = numbers.float().sigmoid()[:, None, None].expand(192, 3, D)
        torch.testing.assert_close(out.float(), expected, rtol=2**-7, atol=2**-8)


def test_case_e07_a_window_holds_the_token_and_those_just_before_it() -> None:
    D, values = 64, torch.full((4, 4, 1, 64), NAN)
    for token in range(12):
        values[1 + token // 4, token % 4, 0] = torch.eye(D)[token]
    tables = torch.tensor([[1, 2, 3]], dtype=torch.int32)
    q, keys = torch.zeros(1, 1, D), torch.zeros(4, 4, 1, D)
    for place, seen in ((0, [0]), (2, [0, 1, 2]), (3, [0, 1, 2, 3]), (9, [6, 7, 8, 9])):
        lengths = torch.tensor([place + 1], dtype=torch.int32)
        out = attend(q, keys, values, tables, lengths, None, 1.0, window=4)
        expected = torch.eye(D)[seen].sum(0) / len(seen)
        torch.testing.assert_close(out[0, 0], expected, atol=1e-7, rtol=0)
    starts, lengths = (torch.tensor(x, dtype=torch.int32) for x in ([0, 12], [12]))
    out = attend(q.expand(12, 1, D), keys, values, tables, lengths, starts, 1.0, window=4)
    for place in range(12):
        expected = torch.eye(D)[max(0, place - 3) : place + 1].mean(0)
        torch.testing.assert_close(out[place, 0], expected, atol=1e-7, rtol=0)


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


def test_claims_of_the_docstrings_are_checked() -> None:
    case = make_case([(5, 1), (9, 1)])
    k, v, tables, lengths = case.k_cache, case.v_cache, case.block_tables, case.seq_lens
    with pytest.raises(ValueError, match="q has 1 tokens, seq_lens 2"):
        attend(case.q[:1], k, v, tables, lengths, None, 1.0)
    with pytest.raises(ValueError, match="query_start_loc is"):
        attend(case.q, k, v, tables, lengths, case.query_start_loc[1:], 1.0)
    with pytest.raises(ValueError, match="window is 0"):
        attend(case.q, k, v, tables, lengths, None, 1.0, window=0)
    in_lanes = to_lanes(k, v)
    with pytest.raises(ValueError, match=r"must be .*, in lanes"):
        attend(case.q, in_lanes[0], v, tables, lengths, None, 1.0)
    k, v = k[..., :12].contiguous(), v[..., :12].contiguous()
    with pytest.raises(ValueError, match="head_dim is 12, must be a multiple of 8"):
        attend(case.q[..., :12], k, v, tables, lengths, None, 1.0)
    with pytest.raises(ValueError, match="weight is"):
        cpu_layers.rms_norm(case.q[0], case.q[0, 0, 1:], 1e-5)
    with pytest.raises(ValueError, match="gate_up is"):
        cpu_layers.silu_and_mul(case.q[0, :, 1:])
    with pytest.raises(ValueError, match=r"x is torch.int32, must be float32, bfloat16 or float16"):
        cpu_layers.widen(torch.zeros(3, dtype=torch.int32))


def test_the_wrappers_run_native_code_on_a_cpu(tmp_path: Path) -> None:
    """In a process of its own: in this one Triton's interpreter has the CPU's tensors."""
    program = """
import torch
from kernels.cpu_build import native_code
from kernels.paged_decode import paged_decode
from kernels.paged_prefill import paged_prefill
from kernels.rms_norm import rms_norm
from kernels.rotary import rotary
from kernels.silu_and_mul import silu_and_mul
from native_variants import byte_variants, variant, variants
from paged_cases import make_case
assert (native_code() is not None) == NATIVE
case = make_case([(40, 1), (9, 1)], head_dim=24, block_size=5, window=9)
columns = case.q, case.k_cache, case.v_cache, case.block_tables, case.seq_lens
torch.testing.assert_close(paged_decode(*columns, 0.2, 40, window=9), paged_prefill(
    *columns, case.query_start_loc, 0.2, 1, window=9))
x = torch.ones(2, 6)
torch.testing.assert_close(rms_norm(x, x[0], 0.0), x)
torch.testing.assert_close(silu_and_mul(x), torch.nn.functional.silu(x[:, :3]))
q, angles = torch.ones(1, 2, 8), torch.zeros(1, 4)
rotary(q, q.clone(), angles.cos(), angles)
assert (q == 1).all()
"""
    for native in (True, False):
        environment = {"TRITON_INTERPRET": "0", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
        if not native:
            environment |= {"PATH": str(tmp_path), "CXX": "", "PAGEMILL_CACHE": str(tmp_path)}
        run_program(sys.executable, "-c", f"NATIVE = {native}\n{program}", environment=environment)
