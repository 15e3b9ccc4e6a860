"""A prefix read once gives what every request reading it alone gives."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import cost
from kernels.shared_prefix import shared_prefix
from load_counter import count_bytes
from paged_cases import DEVICE, Case, make_case, unwritten

interpreted = pytest.mark.skipif(DEVICE.type == "cuda", reason="counts loads of the interpreter")


def with_prefix(case: Case, prefix_blocks: int) -> tuple[Case, torch.Tensor]:
    """Let all requests of `case` begin with the blocks of the first one."""
    shared = case.block_tables[0, :prefix_blocks].clone()
    tables = case.block_tables.clone()
    for row, length in enumerate(case.seq_lens.tolist()):
        if length:
            tables[row, :prefix_blocks] = shared
    return dataclasses.replace(case, block_tables=tables), shared


def cascade(case: Case, shared: torch.Tensor, splits: tuple[int, int] | None) -> torch.Tensor:
    # Entries of the prefix are not read: they may be anything.
    tables = case.block_tables.clone()
    tables[:, : len(shared)] = -1
    return shared_prefix(
        case.q,
        case.k_cache,
        case.v_cache,
        shared,
        tables,
        case.seq_lens,
        case.scale,
        case.longest,
        soft_cap=case.soft_cap,
        scales=case.scales,
        out=unwritten(case.q.shape, case.q.dtype),
        num_splits=splits,
    )


def check(
    data: st.DataObject, own: list[int], prefix_blocks: int, splits: tuple[int, int] | None
) -> None:
    size = data.draw(st.sampled_from([8, 16]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    prefix = prefix_blocks * size
    case = make_case(
        [(prefix + own[0], 1), *((prefix + n if n >= 0 else 0, 1) for n in own[1:])],
        heads=data.draw(st.sampled_from([(4, 2), (5, 1), (3, 3)])),
        head_dim=data.draw(st.sampled_from([64, 80, 128])),
        block_size=size,
        dtype=dtype,
        kv_dtype=data.draw(st.sampled_from([dtype, torch.float8_e4m3fn])),
        scales=data.draw(st.sampled_from(["none", "head"])),
        soft_cap=data.draw(st.sampled_from([None, 2.0])),
    )
    case, shared = with_prefix(case, prefix_blocks)
    case.assert_close(cascade(case, shared, splits))


batches = st.lists(st.integers(-1, 40), min_size=1, max_size=5).map(lambda own: [3, *own])
splits = st.none() | st.tuples(st.integers(1, 3), st.integers(1, 3))


@settings(max_examples=6)
@given(data=st.data(), own=batches, prefix_blocks=st.integers(1, 4), splits=splits)
def test_a_cascade_agrees_with_dense_attention(
    data: st.DataObject, own: list[int], prefix_blocks: int, splits: tuple[int, int] | None
) -> None:
    check(data, own, prefix_blocks, splits)


@pytest.mark.slow
@settings(max_examples=150)
@given(data=st.data(), own=batches, prefix_blocks=st.integers(1, 4), splits=splits)
def test_a_cascade_agrees_with_dense_attention_many_times(
    data: st.DataObject, own: list[int], prefix_blocks: int, splits: tuple[int, int] | None
) -> None:
    check(data, own, prefix_blocks, splits)


@pytest.mark.parametrize("scales", ["tensor", "head"])
def test_a_prefix_in_fp8_is_scaled(scales: str) -> None:
    case = make_case([(37, 1), (40, 1)], heads=(6, 3), kv_dtype=torch.float8_e4m3fn, scales=scales)
    case, shared = with_prefix(case, 2)
    case.assert_close(cascade(case, shared, (2, 1)))


def test_an_unused_row_has_no_prefix_either() -> None:
    case, shared = with_prefix(make_case([(37, 1), (0, 1), (33, 1)], soft_cap=2.0), 2)
    out = cascade(case, shared, (1, 1))
    assert (out[1] == 0).all()
    case.assert_close(out)


@interpreted
def test_the_prefix_is_read_once_for_all_rows_of_a_tile() -> None:
    own = [5, 20, 1, 9]
    case, shared = with_prefix(make_case([(48 + n, 1) for n in own], heads=(4, 2)), 3)
    heads = cost.Heads(4, 2, 64, 4, 4)
    with count_bytes(k=case.k_cache, v=case.v_cache) as touched:
        cascade(case, shared, (2, 1))
    expected = cost.cascade_kv_bytes(len(own), 48, sum(own), heads, 16)
    assert touched.read["k"] + touched.read["v"] == expected
