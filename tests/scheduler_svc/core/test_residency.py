"""Lives of sampled blocks are told as the reference tells them, by its scenario's number."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_bench import BLOCK_SIZE, Bench, limits, request
from scheduler_svc.core.free_block_queue import BlockId
from scheduler_svc.core.kv_memory import KvMemory
from scheduler_svc.core.residency import BlockLife, Residency
from scheduler_svc.core.scheduler import Scheduler

S = 1_000_000_000
BLOCK = BlockId(1)


def watch_all() -> Residency:
    return Residency(1, lambda: 0.0)


def test_85_a_life_has_a_length_an_idle_end_and_gaps_between_hits() -> None:
    residency = watch_all()
    residency.allocated([BLOCK], 1 * S)
    residency.hit([BLOCK], 2 * S)
    residency.hit([BLOCK], 3 * S)
    residency.allocated([BLOCK], 4 * S)
    assert residency.take() == [BlockLife(3 * S, 1 * S, (1 * S,))]
    assert residency.take() == []


def test_85_only_the_latest_four_hits_are_kept() -> None:
    residency = watch_all()
    residency.allocated([BLOCK], 0)
    for second in (1, 3, 6, 10, 15):
        residency.hit([BLOCK], second * S)
    residency.allocated([BLOCK], 16 * S)
    assert residency.take() == [BlockLife(16 * S, 1 * S, (3 * S, 4 * S, 5 * S))]


def test_a_block_without_a_hit_is_idle_since_its_allocation() -> None:
    residency = watch_all()
    residency.allocated([BLOCK], 2 * S)
    residency.allocated([BLOCK], 7 * S)
    assert residency.take() == [BlockLife(5 * S, 5 * S, ())]


@pytest.mark.parametrize("sample", [0, -0.1, 1.1, float("nan")])
def test_85_a_sample_outside_its_bounds_is_rejected(sample: float) -> None:
    with pytest.raises(ValueError, match="must be above 0 and at most 1"):
        Residency(sample, lambda: 0.0)


def test_85_unsampled_blocks_give_nothing() -> None:
    residency = Residency(0.5, lambda: 0.999999)
    for now in range(10):
        residency.allocated([BLOCK], now)
        residency.hit([BLOCK], now)
    assert residency.take() == []


def test_an_emptied_cache_forgets_lives_and_keeps_those_that_ended() -> None:
    residency = watch_all()
    residency.allocated([BLOCK], 0)
    residency.allocated([BLOCK], S)
    residency.clear()
    residency.allocated([BLOCK], 5 * S)
    assert residency.take() == [BlockLife(S, S, ())]


@given(sizes=st.lists(st.integers(0, 3), min_size=1), seed=st.integers(0, 9))
def test_sampling_does_not_depend_on_how_blocks_are_grouped(sizes: list[int], seed: int) -> None:
    one, many = (Residency(0.4, random.Random(seed).random) for _ in range(2))
    number = 0
    for size in sizes:
        blocks = [BlockId(number + i) for i in range(size)]
        many.allocated(blocks, 0)
        for block in blocks:
            one.allocated([block], 0)
        number += size
    assert one._lives == many._lives


def test_the_share_of_sampled_blocks_is_the_one_asked_for() -> None:
    residency = Residency(0.01, random.Random(3).random)
    residency.allocated([BlockId(i) for i in range(100_000)], 0)
    # A binomial number with mean 1,000 and a deviation of 31.
    assert 850 < len(residency._lives) < 1150


def lives_of(prompts: Sequence[list[int]], num_blocks: int) -> list[BlockLife]:
    residency = watch_all()
    scheduler = Scheduler(limits(), memory=KvMemory(residency=residency))
    table = Bench(scheduler, num_blocks)
    for number, prompt in enumerate(prompts):
        table.now_ns = 1000 * number
        table.send(request(str(number), prompt, 1))
        table.run()
    return residency.take()


def test_the_scheduler_tells_lives_with_the_times_it_was_given() -> None:
    first, other = [1] * (2 * BLOCK_SIZE), [2] * (4 * BLOCK_SIZE)
    lives = lives_of([[*first, 5], [*first, 5], [*first, 5], other], 4)
    # Two blocks were hit at 1,001 and 2,001; the tail's was handed out each time, hit never.
    # The fourth prompt took all at 3,001; the fourth block had no life before.
    assert sorted((life.lifetime_ns, life.idle_ns, life.reuse_gaps_ns) for life in lives) == [
        (1000, 1000, ()),
        (1000, 1000, ()),
        (1000, 1000, ()),
        (3000, 1000, (1000,)),
        (3000, 1000, (1000,)),
    ]


def test_a_flush_forgets_the_lives_of_all_blocks() -> None:
    residency = watch_all()
    table = Bench(Scheduler(limits(), memory=KvMemory(residency=residency)), 2)
    table.send(request("a", [1] * (2 * BLOCK_SIZE), 1))
    table.run()
    table.scheduler.flush_cache()
    table.send(request("b", [2] * (2 * BLOCK_SIZE), 1))
    table.run()
    assert residency.take() == []


def test_siblings_that_are_forked_hit_nothing() -> None:
    residency = watch_all()
    table = Bench(Scheduler(limits(), memory=KvMemory(residency=residency)), 32)
    table.send(request("family", [1] * (2 * BLOCK_SIZE), 3, n=4))
    table.run()
    assert residency._lives
    assert all(len(stamps) == 1 for stamps in residency._lives.values())
