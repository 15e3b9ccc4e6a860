"""Columns of rows: free rows ask for nothing, and only a row's own stop ids end it."""

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.request import Request, Sampling, Stopping
from scheduler_svc.core.rows import Rows
from scheduler_svc.core.step_plan import Int32Array

# Few ids, some of which share their lowest 16 bits.
ids = st.sampled_from([0, 1, 2, 0x10001, 0x20001, 2**31 - 1])
stop_sets = st.frozensets(ids, max_size=6)


def int32(*numbers: int) -> Int32Array:
    return np.array(numbers, dtype=np.int32)


def taken(rows: Rows, name: str, stops: frozenset[int], min_output: int = 0) -> Request:
    """Return a request of two tokens with a row."""
    stopping = Stopping(None, eos_token_ids=stops, min_output_tokens=min_output)
    request = Request(name, array("i", [7, 8]), Sampling(0.0), stopping)
    request.sequence = request.limit = 99
    rows.take(request, 2, len(request.blocks))
    return request


@given(
    left=st.lists(stop_sets, max_size=3),
    stops=st.lists(stop_sets, min_size=1, max_size=4),
    data=st.data(),
)
def test_a_row_stops_at_its_own_ids_alone(
    left: list[frozenset[int]], stops: list[frozenset[int]], data: st.DataObject
) -> None:
    rows = Rows(8, 16)
    gone = [taken(rows, f"gone {number}", each) for number, each in enumerate(left)]
    living = [taken(rows, str(number), each) for number, each in enumerate(stops)]
    for request in gone:
        rows.give_back(request)
    rows.check()
    sampled = data.draw(st.lists(ids, min_size=len(stops), max_size=len(stops)))
    order = np.array([rows.row_of(request) for request in living])
    rows.num_pending[order] = 1
    rows.append(order, int32(*sampled))
    expected = [token in own for token, own in zip(sampled, stops, strict=True)]
    assert rows.stops(order, int32(*sampled)).tolist() == expected


def test_stop_ids_count_from_the_least_output_on() -> None:
    rows = Rows(1, 8)
    taken(rows, "late", frozenset({5}), min_output=2)
    row = np.array([0])
    rows.num_pending[row] = 2
    assert [
        rows.append(row, int32(5)).tolist() and rows.stops(row, int32(5)).tolist() for _ in range(2)
    ] == [[False], [True]]


def test_append_gives_each_row_its_token_at_its_own_end() -> None:
    rows = Rows(3, 4)
    requests = [taken(rows, str(number), frozenset()) for number in range(3)]
    rows.num_pending[:] = (1, 0, 2)
    assert rows.append(np.array([0, 2]), int32(50, 51)).tolist() == [3, 3]
    assert rows.num_pending.tolist() == [0, 0, 1]
    assert rows.append(np.array([2]), int32(52)).tolist() == [4]
    for request in requests:
        rows.give_back(request)
    assert [r.tokens.tolist() for r in requests] == [[7, 8, 50], [7, 8], [7, 8, 51, 52]]


def test_a_count_left_in_a_free_row_is_found() -> None:
    rows = Rows(2, 8)
    rows.give_back(taken(rows, "first", frozenset({3})))
    rows.check()
    rows.num_blocks[0] = 1
    with pytest.raises(InvariantError, match="free row"):
        rows.check()
