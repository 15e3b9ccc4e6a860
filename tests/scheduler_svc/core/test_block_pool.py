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
from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.eviction import EVICTION_POLICIES
from scheduler_svc.core.free_block_queue import BlockId

NUM_BLOCKS = 6
POLICIES = sorted(EVICTION_POLICIES)
names = st.sampled_from([BlockHash(bytes([i])) for i in range(4)])


class PoolAgainstTables(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.tables: list[list[BlockId]] = []
        self.names: dict[BlockId, BlockHash] = {}

    @initialize(policy=st.sampled_from(POLICIES))
    def choose_policy(self, policy: str) -> None:
        self.pool = BlockPool(NUM_BLOCKS, EVICTION_POLICIES[policy])

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
            self.pool.share([block])
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

    @rule()
    def flush(self) -> None:
        assert self.pool.flush() == len(self.names)
        self.names.clear()

    @invariant()
    def agrees(self) -> None:
        self.pool.check(self.tables)
        in_use = {b for table in self.tables for b in table}
        assert self.pool.num_used == len(in_use)
        assert self.pool.num_idle_cached == len(self.names.keys() - in_use)
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


def test_the_check_bites() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    with pytest.raises(InvariantError, match="has 1 users"):
        pool.check([blocks[:1]])
