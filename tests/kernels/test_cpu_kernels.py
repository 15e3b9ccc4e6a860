"""Native code on a CPU agrees with its references, for every width of vectors it is built for."""

import itertools
import math
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commands import run as run_program
from kernels import cpu_layers
from kernels.cache_layout import LANES, to_lanes
from kernels.cpu_attention import attend
from native_variants import byte_variants, variant, variants
from paged_cases import HEADS, NAN, Case, make_case
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


def assert_close(case: Case, out: torch.Tensor, noise: float = 1e-5) -> None:
    """Check for one rounding of the result, and half a unit for weights rounded to q's type.

    `noise`: fp32's, of sums over some hundred keys, in units of the largest value in sight.
    """
    exact = case.expected()
    unit = UNIT[out.dtype]
    size = max(1.0, float(case.v_cache.float().nan_to_num().abs().max()))
    if case.scales is not None:
        size *= max(1.0, float(case.scales.v.max()))
    noise = (noise + (unit / 2 if out.dtype == torch.bfloat16 else 0.0)) * size
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


# What is added to each element of some tokens' keys. Scores are some 260 apart then, and
# exp(89) is more than fp32 holds.
SHIFTS = (-math.inf, -25.0, 0.0, 25.0)
shifts = st.sampled_from(SHIFTS)


def shifted(
    pieces: Iterable[tuple[int, float]], dtype: torch.dtype, new: int = 1, window: int | None = None
) -> Case:
    """Return one request, of pieces of so many tokens with a shift each."""
    of_token = torch.cat([torch.full((count,), shift) for count, shift in pieces])
    length = len(of_token)
    case = make_case([(length, new)], heads=(6, 2), dtype=dtype, window=window)
    case.q.copy_(case.q.abs() + 0.5)
    place = torch.arange(length)
    blocks = case.block_tables[0, place // 16].long()
    there = blocks >= 0
    slots = blocks[there], (place % 16)[there]
    case.k_cache[slots] += of_token.to(dtype)[there, None, None]
    return case


@variants
@settings(max_examples=40)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    pieces=st.lists(st.tuples(st.integers(1, 300), shifts), max_size=4),
    last=st.tuples(st.integers(3, 20), st.sampled_from(SHIFTS[1:])),
    new=st.sampled_from([1, 3]),
    window=st.none() | st.integers(1, 500),
    num_threads=threads,
    lanes=st.booleans(),
)
def test_scores_may_lie_as_far_apart_as_they_like_and_some_at_minus_infinity(
    name: str, dtype: torch.dtype, pieces: list[tuple[int, float]], last: tuple[int, float],
    new: int, window: int | None, num_threads: int, *, lanes: bool,
) -> None:  # fmt: skip
    """Whole tiles in which nothing has weight among them."""
    case = shifted([*pieces, last], dtype, new, window)
    # Of scores of some hundred, fp32 keeps as much.
    assert_close(case, run(case, name, num_threads, decode=new == 1, lanes=lanes), noise=1e-3)


@variants
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_parts_may_lie_as_far_apart_as_they_like_in_any_order(
    name: str, dtype: torch.dtype
) -> None:
    for order in itertools.permutations(SHIFTS):
        case = shifted([(300, shift) for shift in order], dtype)
        assert_close(case, run(case, name, 3, decode=True, lanes=True), noise=1e-3)


@variants
@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_of_one_request_stays_in_it(name: str, dtype: torch.dtype, new: int) -> None:
    """The others are computed after it, where it was computed."""
    lengths = [(length, new) for length in (40, 17, 3, 300, 64)]
    for lanes in (False, True):
        case = make_case(lengths, dtype=dtype)
        clean = run(case, name, decode=new == 1, lanes=lanes)
        for cache in (case.k_cache, case.v_cache):
            cache[case.block_tables[0, 0]] = NAN
        caches = case.k_cache, case.v_cache
        out = attend(case.q, *(to_lanes(*caches) if lanes else caches), case.block_tables,
                     case.seq_lens, case.query_start_loc, case.scale, num_threads=1,
                     code=variant(name))  # fmt: skip
        assert out[:new].isnan().all()
        assert torch.equal(out[new:], clean[new:])


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
