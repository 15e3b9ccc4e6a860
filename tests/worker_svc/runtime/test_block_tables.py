"""Block tables hold what lists would hold, and refuse what no cache has."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plan_driver import int32
from worker_svc.errors import InvariantError
from worker_svc.runtime.block_tables import BlockTables

MAX_ROWS, MAX_BLOCKS, LAST_BLOCK = 5, 12, 50

blocks = st.integers(1, LAST_BLOCK)
replacements = st.tuples(st.integers(0, MAX_ROWS - 1), st.lists(blocks, max_size=MAX_BLOCKS))
appends = st.lists(st.tuples(st.integers(0, MAX_ROWS - 1), blocks), max_size=20)


@given(
    changes=st.lists(replacements | appends, max_size=10), block_size=st.sampled_from([1, 4, 16])
)
def test_tables_are_lists(
    changes: list[tuple[int, list[int]] | list[tuple[int, int]]], block_size: int
) -> None:
    tables = BlockTables(MAX_ROWS, MAX_BLOCKS, block_size, LAST_BLOCK)
    lists: list[list[int]] = [[] for _ in range(MAX_ROWS)]
    for change in changes:
        if isinstance(change, tuple):
            row, held = change
            tables.replace(row, int32(*held))
            lists[row] = list(held)
            continue
        fitting = []
        for row, block in change:
            if len(lists[row]) < MAX_BLOCKS:
                lists[row].append(block)
                fitting.append((row, block))
        tables.append(int32(*(row for row, _ in fitting)), int32(*(block for _, block in fitting)))
    for row, held in enumerate(lists):
        assert tables.ids[row, : tables.num_blocks[row]].tolist() == held
    assert tables.num_slots(np.arange(MAX_ROWS)).tolist() == [block_size * len(b) for b in lists]
    places = [(row, i) for row, held in enumerate(lists) for i in range(len(held) * block_size)]
    rows, positions = (np.array(column, dtype=np.int64) for column in _two_columns(places))
    found = tables.slot_mapping(rows, positions)
    assert found.dtype == np.int64
    assert found.tolist() == [
        lists[row][i // block_size] * block_size + i % block_size for row, i in places
    ]


def _two_columns(entries: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    return [first for first, _ in entries], [second for _, second in entries]


def test_slots_are_counted_beyond_32_bits() -> None:
    tables = BlockTables(1, 1, 1 << 20, last_block=1 << 20)
    tables.replace(0, int32(1 << 20))
    assert tables.slot_mapping(np.array([0]), np.array([5])).tolist() == [(1 << 40) + 5]


def test_blocks_that_are_not_in_the_cache_are_refused() -> None:
    tables = BlockTables(MAX_ROWS, MAX_BLOCKS, 4, LAST_BLOCK)
    for block in (-1, 0, LAST_BLOCK + 1):
        with pytest.raises(InvariantError, match="the cache has 1 to 50"):
            tables.replace(0, int32(3, block))
        with pytest.raises(InvariantError, match="the cache has 1 to 50"):
            tables.append(int32(0, 1), int32(3, block))


def test_a_row_has_no_more_blocks_than_its_length_needs() -> None:
    tables = BlockTables(MAX_ROWS, MAX_BLOCKS, 4, LAST_BLOCK)
    with pytest.raises(InvariantError, match="a row gets 13 blocks, at most 12"):
        tables.replace(0, int32(*range(1, MAX_BLOCKS + 2)))
    tables.replace(0, int32(*range(1, MAX_BLOCKS + 1)))
    with pytest.raises(InvariantError, match="a row gets 13 blocks, at most 12"):
        tables.append(int32(1, 0), int32(3, 4))
