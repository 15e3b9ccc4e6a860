"""Step inputs are what one would write down token by token."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.cpu_build import native_code
from kernels.cpu_inputs import CpuInputs, RowColumns
from plan_driver import int32, make_plan
from worker_svc.runtime.block_tables import BlockTables
from worker_svc.runtime.native_inputs import input_builder
from worker_svc.runtime.rows import Rows
from worker_svc.runtime.step_inputs import StepInputs, build_step_inputs
from worker_svc.runtime.step_plan import AdmittedRow, Draft, Pooling, SamplingParams

MAX_TOKENS, BLOCK_SIZE = 40, 4

lengths = st.integers(1, MAX_TOKENS).flatmap(
    lambda count: st.tuples(st.just(count), st.integers(0, count - 1), st.integers(0, count))
)


def by_numpy(rows: Rows) -> StepInputs:
    return build_step_inputs(rows, rows.running(), torch.device("cpu"))


def by_native_code(rows: Rows) -> StepInputs:
    return input_builder(rows, torch.device("cpu"))(rows.running())


builders = pytest.mark.parametrize("build", [by_numpy, by_native_code])


@builders
@given(
    load=st.dictionaries(st.integers(0, 7), lengths, min_size=1, max_size=6),
    seed=st.integers(0, 1000),
)
def test_columns_are_what_one_would_write_by_hand(
    build: Callable[[Rows], StepInputs], load: dict[int, tuple[int, int, int]], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    rows = Rows(8, MAX_TOKENS, (BlockTables(8, 10, BLOCK_SIZE, last_block=99),), vocab=1000)
    known = {}
    for row, (count, computed, new) in load.items():
        tokens = rng.integers(0, 1000, count).astype(np.int32)
        blocks = rng.permutation(99)[: -(-count // BLOCK_SIZE)].astype(np.int32) + 1
        known[row] = (tokens, computed, min(new, count - computed), blocks)
    rows.apply(
        make_plan(
            0,
            admitted=[
                AdmittedRow(row, "r", tokens, 1, computed, new, (blocks,), SamplingParams())
                for row, (tokens, computed, new, blocks) in known.items()
            ],
        )
    )
    running = sorted(row for row, entry in known.items() if entry[2])
    assert rows.running().tolist() == running
    if not running:
        return
    found = build(rows)

    token_ids, positions, slots, starts, seq_lens = [], [], [], [0], []
    last_tokens, sampling = [], []
    for place, row in enumerate(running):
        tokens, computed, new, blocks = known[row]
        for position in range(computed, computed + new):
            token_ids.append(tokens[position])
            positions.append(position)
            slots.append(blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
        starts.append(len(token_ids))
        seq_lens.append(computed + new)
        used = blocks[: -(-(computed + new) // BLOCK_SIZE)]
        assert found.block_tables[0][place, : len(used)].tolist() == used.tolist()
        if computed + new == len(tokens):
            sampling.append(row)
            last_tokens.append(len(token_ids) - 1)
    assert found.token_ids.tolist() == token_ids
    assert found.positions.tolist() == positions
    assert found.slot_mappings[0].tolist() == slots
    assert found.query_start_loc.tolist() == starts
    assert found.seq_lens.tolist() == seq_lens
    assert found.sampling_rows.tolist() == sampling
    assert found.last_tokens.tolist() == last_tokens
    assert found.read_tokens is not None
    assert found.read_tokens.tolist() == last_tokens
    assert found.block_tables[0].shape[1] == -(-max(seq_lens) // BLOCK_SIZE)
    for column in (found.token_ids, found.positions, found.slot_mappings[0], found.last_tokens):
        assert column.dtype == torch.int64
    for column in (found.block_tables[0], found.seq_lens, found.query_start_loc):
        assert column.dtype == torch.int32


@builders
@pytest.mark.parametrize("asks", [{}, {"pooling": Pooling.MEAN}, {"prompt_logprobs": 0}])
def test_of_rows_that_only_sample_the_last_tokens_are_read(
    build: Callable[[Rows], StepInputs], asks: dict[str, Any]
) -> None:
    rows = Rows(2, MAX_TOKENS, (BlockTables(2, 10, BLOCK_SIZE, last_block=9),), vocab=100)
    plain, asking = (
        AdmittedRow(row, "r", int32(5, 6), 2, 0, 2, (int32(row + 1),), SamplingParams())
        for row in range(2)
    )
    rows.apply(make_plan(0, admitted=[plain, dataclasses.replace(asking, **asks)]))
    read = build(rows).read_tokens
    assert (None if read is None else read.tolist()) == (None if asks else [1, 3])


@builders
def test_of_rows_with_drafts_all_tokens_are_read(build: Callable[[Rows], StepInputs]) -> None:
    rows = Rows(2, MAX_TOKENS, (BlockTables(2, 10, BLOCK_SIZE, last_block=9),), vocab=100)
    entry = AdmittedRow(1, "r", int32(5, 6), 2, 0, 2, (int32(3),), SamplingParams())
    rows.apply(make_plan(0, admitted=[entry]))
    rows.append_tokens(rows.running(), int32(42))
    plan = make_plan(1, exceptions=[(1, 2, 2)])
    rows.apply(dataclasses.replace(plan, drafts=(Draft(1, int32(8)),)))
    found = build(rows)
    assert found.read_tokens is None
    assert found.block_tables[0].tolist() == [[3]] * 2  # each drafted token is a row of its own
    rows.apply(make_plan(2, exceptions=[(1, 4, 0)]))
    assert not rows.has_drafts


@builders
def test_a_token_just_sampled_is_the_next_to_run(build: Callable[[Rows], StepInputs]) -> None:
    rows = Rows(2, MAX_TOKENS, (BlockTables(2, 10, BLOCK_SIZE, last_block=9),), vocab=100)
    entry = AdmittedRow(1, "r", int32(5, 6), 2, 0, 2, (int32(3),), SamplingParams())
    rows.apply(make_plan(0, admitted=[entry]))
    rows.append_tokens(rows.running(), int32(42))
    rows.apply(make_plan(1))
    found = build(rows)
    assert found.token_ids.tolist() == [42]
    assert found.positions.tolist() == [2]
    assert found.slot_mappings[0].tolist() == [3 * BLOCK_SIZE + 2]


FIELDS = (
    "token_ids", "positions", "seq_lens", "query_start_loc", "last_tokens", "read_tokens",
)  # fmt: skip


@given(seed=st.integers(0, 1000), num_steps=st.integers(1, 12))
def test_one_builder_for_many_steps_builds_what_numpy_does(seed: int, num_steps: int) -> None:
    """Steps that are alike share memory, others do not; rows come, go and have several groups."""
    rng = np.random.default_rng(seed)
    tables = tuple(BlockTables(4, 10, BLOCK_SIZE, last_block=99, windowed=True) for _ in "ab")
    rows = Rows(4, MAX_TOKENS, tables, vocab=1000)
    build = input_builder(rows, torch.device("cpu"))
    free = {0, 1, 2, 3}
    pooled: set[int] = set()  # to their ends
    for step in range(num_steps):
        admitted, released = [], []
        for row in range(4):
            if row in free and rng.random() < 0.4:
                tokens = rng.integers(0, 1000, rng.integers(1, 20)).astype(np.int32)
                blocks = [rng.integers(0, 99, 10).astype(np.int32) for _ in tables]
                pooling = Pooling.MEAN if rng.random() < 0.2 else None
                entry = AdmittedRow(
                    row, "r", tokens, 1, 0, int(rng.integers(1, len(tokens) + 1)), tuple(blocks),
                    SamplingParams(), pooling=pooling,
                )  # fmt: skip
                admitted.append(entry)
                free.discard(row)
            elif row not in free and (row in pooled or rng.random() < 0.2):
                released.append(row)
                free.add(row)
        # Whoever has tokens left of its prompt runs on, one by one.
        pooled.clear()
        rows.apply(make_plan(step, admitted=admitted, released=released))
        running = rows.running()
        if not len(running):
            continue
        wanted, found = build_step_inputs(rows, running, torch.device("cpu")), build(running)
        for name in FIELDS:
            one, other = getattr(wanted, name), getattr(found, name)
            assert (one is None and other is None) or torch.equal(one, other), name
        assert found.sampling_rows.tolist() == wanted.sampling_rows.tolist()
        for ours, theirs in zip(found.slot_mappings, wanted.slot_mappings, strict=True):
            assert torch.equal(ours, theirs)
        for ours, theirs in zip(found.block_tables, wanted.block_tables, strict=True):
            assert torch.equal(ours, theirs)
        ends = rows.num_computed_tokens + rows.num_new_tokens
        pooled |= set(running[(ends == rows.num_tokens)[running]].tolist())
        pooled -= set(found.sampling_rows.tolist())
        rows.append_tokens(found.sampling_rows, np.zeros(len(found.sampling_rows), dtype=np.int32))


def test_columns_that_native_code_cannot_read_are_refused() -> None:
    code = native_code()
    if code is None:
        pytest.skip("this machine compiles no C++")
    column = np.zeros(3, dtype=np.int32)
    good = RowColumns(
        np.zeros((3, 8), dtype=np.int32), column, column, column, np.zeros(3, dtype=np.int64),
        (np.zeros((3, 2), dtype=np.int32),),
    )  # fmt: skip
    CpuInputs(good, 4, code)
    wrong: list[dict[str, Any]] = [
        {"num_tokens": column.astype(np.int64)},
        {"pooling": column},
        {"num_new_tokens": np.zeros(6, dtype=np.int32)[::2]},
        {"num_computed_tokens": np.zeros(4, dtype=np.int32)},
        {"block_tables": (good.block_tables[0], np.zeros((3, 3), dtype=np.int32))},
    ]
    for change in wrong:
        with pytest.raises(ValueError, match=f"{next(iter(change))} is"):
            CpuInputs(good._replace(**change), 4, code)
