"""Each policy evicts in its documented order, and a scan flushes a hot prefix only under one."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scheduler_bench import BLOCK_SIZE, Bench, limits, request
from scheduler_svc.core.block_hash import BlockHash
from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.eviction import (
    EVICTION_POLICIES,
    EvictionPolicy,
    LruEviction,
    ReuseAwareEviction,
)
from scheduler_svc.core.free_block_queue import BlockId, FreeBlockQueue
from scheduler_svc.core.kv_memory import KvMemory
from scheduler_svc.core.scheduler import Scheduler

NUM_BLOCKS = 12
BLOCKS = [BlockId(i) for i in range(1, NUM_BLOCKS + 1)]


class LruModel:
    """Lists, searched from one end to the other."""

    def __init__(self) -> None:
        self.idle: list[BlockId] = []

    def evict_one(self) -> BlockId:
        return self.idle.pop(0)

    def add(self, block: BlockId) -> None:
        self.idle.append(block)

    def remove(self, block: BlockId) -> None:
        self.idle.remove(block)

    def published(self, block: BlockId, came_back: bool) -> None: ...

    def hit(self, block: BlockId) -> None: ...

    def all(self) -> list[BlockId]:
        return self.idle


class ReuseModel(LruModel):
    """One list in order of release, and each block's uses."""

    def __init__(self) -> None:
        super().__init__()
        self.uses = dict.fromkeys(BLOCKS, 0)

    def evict_one(self) -> BlockId:
        fresh = [block for block in self.idle if not self.uses[block]]
        if fresh and len(fresh) / len(self.idle) >= 0.1:
            self.idle.remove(fresh[0])
            return fresh[0]
        while True:
            block = next(block for block in self.idle if self.uses[block])
            self.idle.remove(block)
            if self.uses[block] == 1:
                return block
            self.uses[block] -= 1
            self.idle.append(block)

    def published(self, block: BlockId, came_back: bool) -> None:
        self.uses[block] = int(came_back)

    def hit(self, block: BlockId) -> None:
        self.uses[block] = min(3, self.uses[block] + 1)

    def all(self) -> list[BlockId]:
        return sorted(self.idle, key=lambda block: self.uses[block] > 0)


class PolicyAgainstModel(RuleBasedStateMachine):
    """A block is outside, in use, or idle in the policy."""

    make: Callable[[int], EvictionPolicy]
    make_model: Callable[[], LruModel]

    def __init__(self) -> None:
        super().__init__()
        self.policy = type(self).make(NUM_BLOCKS)
        self.model = type(self).make_model()
        self.in_use = list(BLOCKS)

    @precondition(lambda self: self.in_use)
    @rule(data=st.data(), came_back=st.booleans())
    def publish(self, data: st.DataObject, came_back: bool) -> None:
        block = data.draw(st.sampled_from(self.in_use))
        self.policy.note_published(block, came_back=came_back)
        self.model.published(block, came_back)

    @precondition(lambda self: self.in_use)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(self.in_use), unique=True))
        self.policy.add(blocks)
        for block in blocks:
            self.in_use.remove(block)
            self.model.add(block)

    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(BLOCKS), unique=True))
        for block in blocks:
            if block not in self.in_use:
                self.policy.remove(block)
                self.model.remove(block)
                self.in_use.append(block)
            self.model.hit(block)
        self.policy.note_hits(blocks)

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, len(self.policy)))
        evicted = self.policy.evict(count)
        assert evicted == [self.model.evict_one() for _ in range(count)]
        self.in_use += evicted

    @invariant()
    def agrees(self) -> None:
        assert list(self.policy) == self.model.all()
        assert len(self.policy) == NUM_BLOCKS - len(self.in_use)


class LruAgainstModel(PolicyAgainstModel):
    make = LruEviction
    make_model = LruModel


class ReuseAwareAgainstModel(PolicyAgainstModel):
    make = ReuseAwareEviction
    make_model = ReuseModel


for machine in (LruAgainstModel, ReuseAwareAgainstModel):
    machine.TestCase.settings = settings(deadline=None, max_examples=50)
TestLruAgainstModel = LruAgainstModel.TestCase
TestReuseAwareAgainstModel = ReuseAwareAgainstModel.TestCase


class CountingQueue(FreeBlockQueue):
    """Counts the ids that were pushed."""

    num_pushed = 0

    def push(self, blocks: Sequence[BlockId]) -> None:
        self.num_pushed += len(blocks)
        super().push(blocks)


@given(uses=st.lists(st.integers(0, 5), min_size=1, max_size=NUM_BLOCKS))
def test_a_block_goes_round_twice_at_most_before_it_dies(uses: list[int]) -> None:
    policy = ReuseAwareEviction(NUM_BLOCKS)
    policy._proven = queue = CountingQueue(NUM_BLOCKS, linked=False)
    blocks = BLOCKS[: len(uses)]
    for block, number in zip(blocks, uses, strict=True):
        policy.note_published(block, came_back=False)
        for _ in range(number):
            policy.note_hits([block])
    policy.add(blocks)
    entered = queue.num_pushed
    assert sorted(policy.evict(len(uses))) == blocks
    assert queue.num_pushed - entered == sum(max(0, min(3, number) - 1) for number in uses)


def memory_bench(policy: str, num_blocks: int = 20) -> Bench:
    scheduler = Scheduler(limits(budget=64, length=128), memory=KvMemory(EVICTION_POLICIES[policy]))
    return Bench(scheduler, num_blocks)


def cached(table: Bench, prompt: list[int]) -> int:
    """Run a request to its end, and return the tokens it found in the cache."""
    each = request("x", prompt, 1)
    table.send(each)
    table.run()
    return each.num_cached_tokens


HOT = [1] * (5 * BLOCK_SIZE)


def scan(table: Bench, count: int, first: int = 100) -> None:
    """Send prompts that nobody sends again: three fill the pool."""
    for number in range(first, first + count):
        assert cached(table, [number] * (7 * BLOCK_SIZE)) == 0


@pytest.mark.parametrize(("policy", "kept"), [("lru", 0), ("reuse-aware", 5 * BLOCK_SIZE)])
def test_a_scan_flushes_a_hot_prefix_only_under_lru(policy: str, kept: int) -> None:
    table = memory_bench(policy)
    for _ in range(3):
        cached(table, [*HOT, 2])
    scan(table, 20)
    assert cached(table, [*HOT, 2]) == kept


def test_what_comes_back_after_its_eviction_is_no_newcomer() -> None:
    table = memory_bench("reuse-aware")
    assert cached(table, [*HOT, 2]) == 0
    scan(table, 4)
    # It was evicted, and is missed; from now on scans leave it alone.
    assert cached(table, [*HOT, 2]) == 0
    scan(table, 20, first=200)
    assert cached(table, [*HOT, 2]) == len(HOT)


def test_what_was_popular_long_ago_gives_way_to_what_is_popular_now() -> None:
    table = memory_bench("reuse-aware")
    for _ in range(10):
        cached(table, [*HOT, 2])
    new = [[50 + number] * (4 * BLOCK_SIZE) for number in range(4)]
    for _ in range(8):
        for prompt in new:
            cached(table, [*prompt, 2])
    assert [cached(table, [*prompt, 2]) for prompt in new] == [4 * BLOCK_SIZE] * 4


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_the_end_of_a_prefix_dies_before_its_beginning(policy: str) -> None:
    table = memory_bench(policy)
    for _ in range(2):
        cached(table, [*HOT, 2])
    # 20 blocks, of which 15 are not the prefix's: two of its own die.
    assert cached(table, [9] * (17 * BLOCK_SIZE - 1)) == 0
    assert cached(table, [*HOT, 2]) == 3 * BLOCK_SIZE


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_empty_blocks_go_before_content(policy: str) -> None:
    pool = BlockPool(3, EVICTION_POLICIES[policy])
    named, empty, _ = pool.allocate(3)
    pool.publish(named, BlockHash(b"n"))
    pool.release([named, empty])
    assert pool.allocate(1) == [empty]
    assert pool.lookup(BlockHash(b"n")) == named
    assert pool.allocate(1) == [named]
    assert pool.was_evicted(BlockHash(b"n"))
