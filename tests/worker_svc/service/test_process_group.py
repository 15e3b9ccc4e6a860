"""Ranks exchange what they should, and none waits for one that is gone."""

import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from thread_ranks import on_all_ranks
from worker_svc.errors import InvariantError, RanksLostError
from worker_svc.model.shard import Shard
from worker_svc.service.process_group import ProcessGroup


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_all_ranks_get_the_sum(dtype: torch.dtype) -> None:
    def run(group: ProcessGroup) -> list[float]:
        part = torch.full((2, 3), 1.0 + group.shard.rank, dtype=dtype)
        group.all_reduce(part)
        return part.flatten().tolist()

    assert on_all_ranks(3, run) == [[6.0] * 6] * 3


@example(50_001, torch.float32)  # more than a part sent to all
@example(100_000, torch.bfloat16)
@given(st.integers(0, 100_000), st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=8, deadline=None)
def test_sums_of_any_size_are_right_and_equal_in_all_bits(size: int, dtype: torch.dtype) -> None:
    made = torch.Generator().manual_seed(size)
    parts = torch.randn(3, size, generator=made).to(dtype)

    def run(group: ProcessGroup) -> list[torch.Tensor]:
        group.least(3)  # a shorter one before it
        twice = [parts[group.shard.rank].clone() for _ in range(2)]
        for part in twice:
            group.all_reduce(part)
        return twice

    expected = ((parts[0].float() + parts[1]) + parts[2]).to(dtype)
    for found in on_all_ranks(3, run):
        assert all(torch.equal(each, expected) for each in found)


def test_sums_of_one_type_follow_those_of_another() -> None:
    def run(group: ProcessGroup) -> list[float]:
        group.all_reduce(torch.ones(7, dtype=torch.bfloat16))  # 14 bytes
        part = torch.full((3,), 0.5)
        group.all_reduce(part)
        return part.tolist()

    assert on_all_ranks(3, run) == [[1.5] * 3] * 3


def test_no_tokens_are_shared_as_none() -> None:
    nothing = np.empty(0, np.int32)
    assert [
        shared.size for shared in on_all_ranks(2, lambda group: group.share_tokens(nothing))
    ] == [0, 0]


def test_rank_0_gets_every_part_in_order_and_the_others_have_their_own() -> None:
    def run(group: ProcessGroup) -> list[list[int]]:
        parts = group.gather(torch.tensor([group.shard.rank, 7]))
        return [part.tolist() for part in parts]

    assert on_all_ranks(3, run) == [[[0, 7], [1, 7], [2, 7]], [[1, 7]], [[2, 7]]]


def test_all_ranks_get_rank_0s_tokens_and_the_smallest_number() -> None:
    def run(group: ProcessGroup) -> tuple[list[int], int]:
        tokens = np.array([10 + group.shard.rank, -1], dtype=np.int32)
        return group.share_tokens(tokens).tolist(), group.least(100 - group.shard.rank)

    assert on_all_ranks(3, run) == [([10, -1], 98)] * 3


def test_the_largest_values_are_found_place_by_place_and_the_ranks_own_stay() -> None:
    def run(group: ProcessGroup) -> tuple[list[float], list[float]]:
        rank = float(group.shard.rank)
        own = torch.tensor([rank, -rank, float("inf") if rank == 1 else 0.0])
        return group.largest(own).tolist(), own[:2].tolist()

    largest = [2.0, 0.0, float("inf")]
    assert on_all_ranks(3, run) == [(largest, [rank, -rank]) for rank in (0.0, 1.0, 2.0)]


def test_apart_nothing_is_exchanged() -> None:
    group = ProcessGroup(Shard(0, 2), "cpu")
    part = torch.ones(4)
    with group.apart():
        group.all_reduce(part)
        assert [each.tolist() for each in group.gather(part)] == [[1.0] * 4] * 2
    with pytest.raises(InvariantError, match="before they have met"):
        group.all_reduce(part)


def test_a_rank_that_leaves_is_noticed_by_who_waits_for_it() -> None:
    def run(group: ProcessGroup) -> str:
        if group.shard.rank == 1:
            return "left"
        with pytest.raises(RanksLostError) as caught:
            group.all_reduce(torch.ones(4))
        return str(caught.value)

    first, second = on_all_ranks(2, run)
    assert second == "left"
    assert first.startswith("the connection to rank 1 ended")


def test_who_waits_for_a_rank_that_hangs_ends_when_the_group_is_given_up() -> None:
    given_up, over = threading.Event(), threading.Event()

    def run(group: ProcessGroup) -> float:
        if group.shard.rank == 1:
            assert over.wait(30)
            return 0.0
        threading.Timer(0.1, given_up.set).start()
        started = time.monotonic()
        try:
            with pytest.raises(RanksLostError, match="given up"):
                group.least(1)
        finally:
            over.set()
        return time.monotonic() - started

    assert max(on_all_ranks(2, run, given_up)) < 10  # of 30 that an exchange may take
