"""Step inputs are what one would write down token by token."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plan_driver import int32, make_plan
from worker_svc.runtime.block_tables import BlockTables
from worker_svc.runtime.rows import Rows
from worker_svc.runtime.step_inputs import build_step_inputs
from worker_svc.runtime.step_plan import AdmittedRow, Draft, Pooling, SamplingParams

MAX_TOKENS, BLOCK_SIZE = 40, 4

lengths = st.integers(1, MAX_TOKENS).flatmap(
    lambda count: st.tuples(st.just(count), st.integers(0, count - 1), st.integers(0, count))
)


@given(
    load=st.dictionaries(st.integers(0, 7), lengths, min_size=1, max_size=6),
    seed=st.integers(0, 1000),
)
def test_columns_are_what_one_would_write_by_hand(
    load: dict[int, tuple[int, int, int]], seed: int
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
    found = build_step_inputs(rows, rows.running(), torch.device("cpu"))

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


@pytest.mark.parametrize("asks", [{}, {"pooling": Pooling.MEAN}, {"prompt_logprobs": 0}])
def test_of_rows_that_only_sample_the_last_tokens_are_read(asks: dict[str, Any]) -> None:
    rows = Rows(2, MAX_TOKENS, (BlockTables(2, 10, BLOCK_SIZE, last_block=9),), vocab=100)
    plain, asking = (
        AdmittedRow(row, "r", int32(5, 6), 2, 0, 2, (int32(row + 1),), SamplingParams())
        for row in range(2)
    )
    rows.apply(make_plan(0, admitted=[plain, dataclasses.replace(asking, **asks)]))
    read = build_step_inputs(rows, rows.running(), torch.device("cpu")).read_tokens
    assert (None if read is None else read.tolist()) == (None if asks else [1, 3])


def test_of_rows_with_drafts_all_tokens_are_read() -> None:
    rows = Rows(2, MAX_TOKENS, (BlockTables(2, 10, BLOCK_SIZE, last_block=9),), vocab=100)
    entry = AdmittedRow(1, "r", int32(5, 6), 2, 0, 2, (int32(3),), SamplingParams())
    rows.apply(make_plan(0, admitted=[entry]))
    rows.append_tokens(rows.running(), int32(42))
    plan = make_plan(1, exceptions=[(1, 2, 2)])
    rows.apply(dataclasses.replace(plan, drafts=(Draft(1, int32(8)),)))
    assert build_step_inputs(rows, rows.running(), torch.device("cpu")).read_tokens is None


def test_a_token_just_sampled_is_the_next_to_run() -> None:
    rows = Rows(2, MAX_TOKENS, (BlockTables(2, 10, BLOCK_SIZE, last_block=9),), vocab=100)
    entry = AdmittedRow(1, "r", int32(5, 6), 2, 0, 2, (int32(3),), SamplingParams())
    rows.apply(make_plan(0, admitted=[entry]))
    rows.append_tokens(rows.running(), int32(42))
    rows.apply(make_plan(1))
    found = build_step_inputs(rows, rows.running(), torch.device("cpu"))
    assert found.token_ids.tolist() == [42]
    assert found.positions.tolist() == [2]
    assert found.slot_mappings[0].tolist() == [3 * BLOCK_SIZE + 2]
