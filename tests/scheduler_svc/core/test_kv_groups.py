"""Windows and chunks hold what tokens to come can see, as scenarios 34 to 39 have it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.core.kv_groups import FULL_ATTENTION, KvGroup, longest_common_hit

groups = st.one_of(
    st.just(KvGroup()),
    st.builds(KvGroup, window=st.integers(1, 12)),
    st.builds(KvGroup, chunk=st.integers(1, 12)),
)


def pattern(text: str) -> list[bool]:
    return [mark == "T" for mark in text]


@pytest.mark.parametrize(
    ("cached", "length"),
    [
        ("TTFTFFTTFTTT", 12),
        ("TTFTFFTTFFF", 8),
        ("T", 1),
        ("TF", 1),
        ("TTF", 2),
        ("FFFF", 0),
        ("", 0),
    ],
)
def test_34_a_window_needs_the_blocks_that_the_next_token_sees(cached: str, length: int) -> None:
    marks = pattern(cached)
    assert KvGroup(window=4).longest_hit(marks.__getitem__, len(marks), 2) == length


@pytest.mark.parametrize(("computed", "unseen"), [(4, 0), (5, 1), (6, 1), (7, 2), (11, 4)])
def test_35_blocks_wholly_before_the_window_are_unseen(computed: int, unseen: int) -> None:
    assert KvGroup(window=4).num_unseen_blocks(computed, 2) == unseen


@pytest.mark.parametrize(("computed", "unseen"), [(4, 2), (6, 2), (12, 6)])
def test_36_blocks_of_earlier_chunks_are_unseen(computed: int, unseen: int) -> None:
    assert KvGroup(chunk=4).num_unseen_blocks(computed, 2) == unseen


@pytest.mark.parametrize(
    ("group", "in_flight", "blocks"),
    [
        (KvGroup(window=1024), 1024, 129),
        (KvGroup(window=1024), 2048, 193),
        (KvGroup(chunk=1024), 1024, 128),
        (KvGroup(chunk=1024), 2048, 192),
        (KvGroup(), 2048, 625),
    ],
)
def test_38_a_request_holds_a_window_and_what_is_in_flight(
    group: KvGroup, in_flight: int, blocks: int
) -> None:
    assert group.most_blocks(10_000, in_flight, 16) == blocks


@given(group=groups, marks=st.lists(st.booleans(), max_size=16), block_size=st.integers(1, 5))
def test_a_hit_is_the_longest_behind_which_all_that_is_seen_is_cached(
    group: KvGroup, marks: list[bool], block_size: int
) -> None:
    def serves(length: int) -> bool:
        return all(marks[group.num_unseen_blocks(length * block_size, block_size) : length])

    longest = max(length for length in range(len(marks) + 1) if serves(length))
    if group.window or group.chunk:
        assert group.longest_hit(marks.__getitem__, len(marks), block_size) == longest
    else:
        assert group.longest_hit(marks.__getitem__, len(marks), block_size) == (
            [*marks, False].index(False)
        )


@given(
    several=st.lists(groups, min_size=1, max_size=3),
    data=st.data(),
    num_blocks=st.integers(0, 10),
    block_size=st.integers(1, 4),
)
def test_a_common_hit_serves_every_group_and_none_longer_does(
    several: list[KvGroup], data: st.DataObject, num_blocks: int, block_size: int
) -> None:
    marks = [
        data.draw(st.lists(st.booleans(), min_size=num_blocks, max_size=num_blocks))
        for _ in several
    ]

    def serves(length: int) -> bool:
        return all(
            all(mark[group.num_unseen_blocks(length * block_size, block_size) : length])
            for group, mark in zip(several, marks, strict=True)
        )

    found = longest_common_hit(several, lambda g, i: marks[g][i], num_blocks, block_size)
    assert found == max(length for length in range(num_blocks + 1) if serves(length))


def test_full_attention_is_one_group_that_sees_all() -> None:
    assert [group.first_seen(1000) for group in FULL_ATTENTION] == [0]


@given(group=groups, num_tokens=st.integers(1, 60), step=st.integers(1, 9), size=st.integers(1, 5))
def test_no_more_blocks_are_held_than_said(
    group: KvGroup, num_tokens: int, step: int, size: int
) -> None:
    for computed in range(0, num_tokens, step):
        end = min(computed + step, num_tokens)
        held = -(-end // size) - group.num_unseen_blocks(computed, size)
        assert held <= group.most_blocks(num_tokens, step, size)


@given(group=groups, computed=st.lists(st.integers(0, 60), max_size=9), size=st.integers(1, 5))
def test_a_column_of_rows_is_told_what_each_row_is(
    group: KvGroup, computed: list[int], size: int
) -> None:
    if not group.sees_all:
        told = group.nums_unseen_blocks(np.array(computed, dtype=np.int32), size)
        assert told.tolist() == [group.num_unseen_blocks(each, size) for each in computed]
