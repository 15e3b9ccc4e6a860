"""Decoding attends to what the request has in sight, in any number of splits, and reads it once."""

import dataclasses
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import cost
from kernels.merge_splits import merge_splits
from kernels.paged_decode import count_splits, paged_decode
from kernels.tuned import Tile
from load_counter import count_bytes
from paged_cases import DEVICE, HEADS, Case, assert_rounded_once, make_case, unwritten

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
interpreted = pytest.mark.skipif(DEVICE.type == "cuda", reason="counts loads of the interpreter")


def decode(case: Case, num_splits: int | None = None, tile: Tile | None = None) -> torch.Tensor:
    out = paged_decode(
        case.q,
        case.k_cache,
        case.v_cache,
        case.block_tables,
        case.seq_lens,
        case.scale,
        case.longest,
        window=case.window,
        soft_cap=case.soft_cap,
        scales=case.scales,
        out=unwritten(case.q.shape, case.q.dtype),
        num_splits=num_splits,
        tile=tile,
    )
    assert not out.isnan().any()
    return out


@st.composite
def cases(draw: st.DrawFn) -> Case:
    block_size = draw(st.sampled_from([8, 16, 32, 64]))
    lengths = draw(st.lists(st.integers(0, 3 * block_size), min_size=1, max_size=4))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    return make_case(
        [(length, 1) for length in lengths],
        heads=draw(st.sampled_from([(4, 2), (5, 1), (7, 1), (3, 3), (12, 2), (20, 1)])),
        head_dim=draw(st.sampled_from([64, 80, 96, 112, 128, 256])),
        block_size=block_size,
        dtype=dtype,
        kv_dtype=draw(st.sampled_from([dtype, dtype, E4M3, E5M2])),
        scales=draw(st.sampled_from(["none", "tensor", "head"])),
        window=draw(st.none() | st.integers(1, 40)),
        soft_cap=draw(st.none() | st.sampled_from([0.5, 30.0])),
        seed=draw(st.integers(0, 1000)),
    )


splits = st.none() | st.integers(1, 5)


@settings(max_examples=12)
@given(case=cases(), num_splits=splits)
def test_any_batch_agrees_with_dense_attention(case: Case, num_splits: int | None) -> None:
    case.assert_close(decode(case, num_splits))


@pytest.mark.slow
@settings(max_examples=400)
@given(case=cases(), num_splits=splits)
def test_any_batch_agrees_with_dense_attention_many_times(
    case: Case, num_splits: int | None
) -> None:
    case.assert_close(decode(case, num_splits))


@pytest.mark.slow
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 256])
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_case_e04_every_ratio_and_head_size_agrees(
    heads: tuple[int, int], head_dim: int, block_size: int
) -> None:
    size = block_size
    lengths = [(length, 1) for length in (1, size - 1, size, size + 1, 3 * size + 5)]
    case = make_case(lengths, heads=heads, head_dim=head_dim, block_size=size)
    torch.testing.assert_close(decode(case), case.expected(), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("heads", "head_dim", "block_size"), [
    ((5, 1), 80, 8), ((7, 1), 112, 16), ((14, 2), 96, 32), ((48, 1), 64, 16), ((3, 3), 256, 8),
])  # fmt: skip
def test_case_e04_odd_ratios_and_head_sizes_agree(
    heads: tuple[int, int], head_dim: int, block_size: int
) -> None:
    lengths = [(length, 1) for length in (1, block_size - 1, block_size + 1, 3 * block_size + 5)]
    case = make_case(lengths, heads=heads, head_dim=head_dim, block_size=block_size)
    torch.testing.assert_close(decode(case), case.expected(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kv_dtype", [torch.float32, E4M3])
def test_case_e02_unused_slots_never_reach_the_result(kv_dtype: torch.dtype) -> None:
    lengths = [(length, 1) for length in (1, 5, 16, 17, 33)]
    poisoned = make_case(lengths, kv_dtype=kv_dtype, heads=(2, 2))
    clean = make_case(lengths, kv_dtype=kv_dtype, heads=(2, 2), filling=0.0)
    assert poisoned.k_cache.float().isnan().any()
    out = decode(poisoned)
    assert out.isfinite().all()
    assert torch.equal(out, decode(clean))
    # A token alone sees its own value, exactly.
    block = int(poisoned.block_tables[0, 0])
    assert torch.equal(out[0], poisoned.v_cache[block, 0].float())


def test_case_e05_fp8_agrees_with_dense_attention_over_the_dequantised_values() -> None:
    case = make_case([(37, 1), (5, 1), (16, 1)], kv_dtype=E4M3, scales="tensor")
    assert case.scales is not None
    scales = dataclasses.replace(case.scales, k=case.scales.k * 0 + 4, v=case.scales.v * 0 + 0.5)
    case = dataclasses.replace(case, scales=scales)
    torch.testing.assert_close(decode(case), case.expected(), atol=1e-3, rtol=0)


@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2])
@pytest.mark.parametrize("scales", ["none", "tensor", "head"])
def test_fp8_of_every_kind_is_scaled_in_every_split(kv_dtype: torch.dtype, scales: str) -> None:
    case = make_case([(37, 1), (5, 1)], heads=(6, 3), kv_dtype=kv_dtype, scales=scales)
    case.assert_close(decode(case, 1))
    case.assert_close(decode(case, 2))


def test_case_e07_a_window_holds_the_token_and_those_just_before_it() -> None:
    D, S, window = 64, 4, 4
    keys = torch.zeros(4, 8, 1, D, device=DEVICE)
    values = torch.full((4, 8, 1, D), float("nan"), device=DEVICE)
    # Twelve tokens in blocks of eight; token i has the value one-hot(i).
    for token in range(12):
        values[2 + token // 8, token % 8, 0] = torch.eye(D, device=DEVICE)[token]
    for place, seen in ((0, [0]), (2, [0, 1, 2]), (3, [0, 1, 2, 3]), (9, [6, 7, 8, 9])):
        out = paged_decode(
            torch.zeros(1, 1, D, device=DEVICE),
            keys,
            values,
            torch.tensor([[2, 3]], dtype=torch.int32, device=DEVICE),
            torch.tensor([place + 1], dtype=torch.int32, device=DEVICE),
            1.0,
            12,
            window=window,
        )
        expected = torch.eye(D, device=DEVICE)[seen].sum(0) / len(seen)
        assert torch.equal(out[0, 0], expected), (place, S)


def test_blocks_before_the_window_may_be_gone() -> None:
    case = make_case([(90, 1), (33, 1)], window=7, block_size=8)
    assert (case.block_tables[0, :10] <= 1).all()
    case.assert_close(decode(case, 3))


@interpreted
@pytest.mark.parametrize(("window", "num_splits"), [(None, 1), (None, 3), (20, 2)])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, E4M3])
def test_each_key_and_value_in_sight_is_read_exactly_once(
    window: int | None, num_splits: int, kv_dtype: torch.dtype
) -> None:
    lengths = [70, 1, 0, 33]
    case = make_case(
        [(length, 1) for length in lengths],
        heads=(6, 2), dtype=torch.bfloat16, kv_dtype=kv_dtype, window=window,
    )  # fmt: skip
    heads = cost.Heads(6, 2, 64, 2, kv_dtype.itemsize)
    with count_bytes(k=case.k_cache, v=case.v_cache, q=case.q, table=case.block_tables) as touched:
        decode(case, num_splits)
    read = touched.read["k"] + touched.read["v"]
    assert read == cost.decode_kv_bytes(lengths, heads, window)
    assert touched.read["q"] == num_splits * len(lengths) * heads.q_bytes
    assert touched.written["k"] == touched.written["v"] == 0
    # Entries of the table are read for tokens in sight only: once per token and key/value head.
    seen = sum(cost.in_sight(length, 1, window) for length in lengths)
    assert touched.read["table"] == 4 * 2 * seen
    # Everything else: lengths, and what splits add.
    scratch = cost.split_bytes(len(lengths), num_splits, heads)
    # The merge reads each sum twice, and every program its request's length.
    sums = 4 * num_splits * len(lengths) * 6
    assert touched.read["?"] <= scratch // 2 + sums + 4 * num_splits * len(lengths) * 2


def test_splits_fill_the_processors_and_stay_within_bounds() -> None:
    # One request of 32k on an H200 gets enough parts for every multiprocessor.
    assert count_splits(8, 32768, 32768, 132) * 8 >= 132 * 2
    # A full batch is not split; a long request among short ones is.
    assert count_splits(8, 1024, 256 * 1024, 132) == 1
    assert count_splits(8, 32768, 32768 + 63 * 512, 132) >= 16
    assert count_splits(8, 200, 200, 132) == 1
    assert count_splits(1, 1 << 20, 1 << 20, 132) == 64


def test_a_wrong_longest_length_costs_time_and_not_correctness() -> None:
    case = make_case([(70, 1), (9, 1)])
    out = paged_decode(case.q, case.k_cache, case.v_cache, case.block_tables, case.seq_lens,
                       case.scale, 8)  # fmt: skip
    case.assert_close(out)


def test_strided_queries_and_tables_are_read_in_place() -> None:
    case = make_case([(40, 1), (9, 1)])
    wide = torch.randn(2, 9, 64, device=DEVICE)
    wide[:, :4] = case.q
    tables = torch.nn.functional.pad(case.block_tables, (0, 5))[:, : case.block_tables.shape[1]]
    case.assert_close(decode(dataclasses.replace(case, q=wide[:, :4], block_tables=tables)))


@given(
    parts=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    head_dim=st.sampled_from([64, 80]),
    seed=st.integers(0, 100),
)
@settings(max_examples=15)
def test_merged_parts_are_the_whole(parts: list[int], head_dim: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(sum(parts), generator=generator) * 10
    values = torch.randn(sum(parts), head_dim, generator=generator)
    partial = torch.full((1, 1, len(parts), head_dim), float("nan"))
    sums = torch.full((1, 1, len(parts)), -torch.inf)
    bounds = [sum(parts[:i]) for i in range(len(parts) + 1)]
    for i, (start, end) in enumerate(pairwise(bounds)):
        s, v = scores[start:end], values[start:end]
        if len(s):
            partial[0, 0, i] = s.softmax(0) @ v
            sums[0, 0, i] = s.logsumexp(0) / torch.log(torch.tensor(2.0))
    out = unwritten((1, 1, head_dim), torch.float32)
    merge_splits(partial.to(DEVICE), sums.to(DEVICE), out)
    assert_rounded_once(out[0, 0].cpu(), scores.softmax(0) @ values)
