"""Users, names and the free queue agree with the block tables, whatever is done to blocks."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from scheduler_svc.core.block_hash import BlockHash
from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.errors import InvariantError, PinQuotaError
from scheduler_svc.core.eviction import EVICTION_POLICIES
from scheduler_svc.core.free_block_queue import BlockId
from scheduler_svc.core.pins import PinEnd, Pins

NUM_BLOCKS = 6
MAX_PINNED = 4
POLICIES = sorted(EVICTION_POLICIES)
names = st.sampled_from([BlockHash(bytes([i])) for i in range(4)])


class PoolAgainstTables(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.tables: list[list[BlockId]] = []
        self.names: dict[BlockId, BlockHash] = {}
        self.pins: dict[int, list[BlockId]] = {}
        self.expiry: dict[int, int] = {}

    @initialize(policy=st.sampled_from(POLICIES))
    def choose_policy(self, policy: str) -> None:
        self.pool = BlockPool(NUM_BLOCKS, EVICTION_POLICIES[policy], pins=Pins(MAX_PINNED))

    @rule(count=st.integers(0, NUM_BLOCKS))
    def allocate(self, count: int) -> None:
        free = self.pool.num_free
        if count > free:
            with pytest.raises(IndexError):
                self.pool.allocate(count)
            return
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count
        assert self.pool.num_free == free - count
        for block in blocks:
            self.names.pop(block, None)
        self.tables.append(blocks)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data(), name=names)
    def publish(self, data: st.DataObject, name: BlockHash) -> None:
        unnamed = [b for table in self.tables for b in table if b not in self.names]
        if unnamed:
            block = data.draw(st.sampled_from(unnamed))
            self.pool.publish(block, name)
            self.names[block] = name

    @rule(name=names)
    def hit(self, name: BlockHash) -> None:
        block = self.pool.lookup(name)
        holders = {b for b, held in self.names.items() if held == name}
        assert block in holders if holders else block is None
        if block is not None:
            self.pool.hit([block])
            self.tables.append([block])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(table[::-1])

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def retract(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.names)))
        self.pool.retract(block)
        del self.names[block]
        cut = {
            n: blocks[: blocks.index(block)] for n, blocks in self.pins.items() if block in blocks
        }
        self.pins = {n: left for n, left in {**self.pins, **cut}.items() if left}

    @precondition(lambda self: self.names)
    @rule(data=st.data(), expires_ns=st.integers(1, 9))
    def pin(self, data: st.DataObject, expires_ns: int) -> None:
        named = st.sampled_from(sorted(self.names))
        blocks = data.draw(st.lists(named, min_size=1, unique=True))
        would_be = {*blocks, *self.pinned()}
        if len(would_be) > MAX_PINNED or len(self.pins) == MAX_PINNED:
            with pytest.raises(PinQuotaError):
                self.pool.pin(blocks, expires_ns)
            return
        number = self.pool.pin(blocks, expires_ns).number
        self.pins[number] = blocks
        self.expiry[number] = expires_ns

    @rule(now_ns=st.integers(0, 6))
    def let_time_pass(self, now_ns: int) -> None:
        self.pool.set_time(now_ns)
        self.pins = {n: blocks for n, blocks in self.pins.items() if self.expiry[n] > now_ns}

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.pins)))
        assert self.pool.end_pin(number, PinEnd.UNPINNED)
        assert not self.pool.end_pin(number, PinEnd.UNPINNED)
        del self.pins[number]

    @rule()
    def break_oldest(self) -> None:
        assert self.pool.break_oldest_pin() == bool(self.pins)
        if self.pins:
            del self.pins[min(self.pins)]

    def pinned(self) -> set[BlockId]:
        return {block for blocks in self.pins.values() for block in blocks}

    @rule()
    def flush(self) -> None:
        assert self.pool.flush() == len(self.names)
        self.names.clear()
        self.pins.clear()

    @invariant()
    def agrees(self) -> None:
        self.pool.check(self.tables)
        in_use = {b for table in self.tables for b in table}
        assert self.pool.num_used == len(in_use)
        assert self.pool.num_idle_cached == len(self.names.keys() - in_use)
        assert self.pool.num_pinned == len(self.pinned())
        due = min((self.expiry[number] for number in self.pins), default=None)
        assert self.pool._pins.next_expiry_ns == due
        assert self.pool.num_free == NUM_BLOCKS - len(in_use | self.pinned())
        assert [pin.blocks for pin in self.pool._pins] == list(self.pins.values())
        outside = self.names.keys() - in_use
        assert self.pool.count_idle(outside) == len(outside - self.pinned())
        assert self.pool.num_used + self.pool.num_idle_cached + self.pool.num_empty == NUM_BLOCKS


PoolAgainstTables.TestCase.settings = settings(deadline=None, max_examples=150)
TestPoolAgainstTables = PoolAgainstTables.TestCase


def test_empty_blocks_are_reused_before_content() -> None:
    pool = BlockPool(3)
    named, empty, _ = pool.allocate(3)
    pool.publish(named, BlockHash(b"n"))
    pool.release([named, empty])
    assert pool.allocate(1) == [empty]
    assert pool.lookup(BlockHash(b"n")) == named


def test_a_twin_takes_over_when_the_first_holder_is_evicted() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    for block in (first, second):
        pool.publish(block, BlockHash(b"n"))
    pool.release([first])
    assert pool.allocate(1) == [first]
    assert pool.lookup(BlockHash(b"n")) == second


def test_a_name_with_another_block_was_not_evicted() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    for block in (first, second):
        pool.publish(block, BlockHash(b"n"))
    pool.release([first])
    pool.allocate(1)
    assert not pool.was_evicted(BlockHash(b"n"))


def test_the_check_bites() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    with pytest.raises(InvariantError, match="has 1 users"):
        pool.check([blocks[:1]])
