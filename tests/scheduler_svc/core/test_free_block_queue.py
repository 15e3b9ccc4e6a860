"""The queue gives ids in the order of a list from whose middle ids may vanish."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scheduler_svc.core.free_block_queue import BlockId, FreeBlockQueue

NUM_BLOCKS = 7


class QueueAgainstList(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.queue = FreeBlockQueue(NUM_BLOCKS)
        self.model = [BlockId(i) for i in range(1, NUM_BLOCKS + 1)]
        self.outside: list[BlockId] = []

    @rule(count=st.integers(0, NUM_BLOCKS))
    def pop(self, count: int) -> None:
        if count > len(self.model):
            with pytest.raises(IndexError):
                self.queue.pop(count)
            return
        taken = self.queue.pop(count)
        assert taken == self.model[:count]
        del self.model[:count]
        self.outside += taken

    @rule(data=st.data(), front=st.booleans())
    def push(self, data: st.DataObject, front: bool) -> None:
        count = data.draw(st.integers(0, len(self.outside)))
        blocks, self.outside = self.outside[:count], self.outside[count:]
        if front:
            self.queue.push_front(blocks)
            self.model[:0] = blocks
        else:
            self.queue.push(blocks)
            self.model += blocks

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.model))
        self.queue.remove(block)
        self.model.remove(block)
        self.outside.append(block)

    @invariant()
    def agrees(self) -> None:
        assert list(self.queue) == self.model
        assert len(self.queue) == len(self.model)


TestQueueAgainstList = QueueAgainstList.TestCase


def test_an_id_removed_from_the_middle_is_not_popped() -> None:
    queue = FreeBlockQueue(4)
    queue.remove(BlockId(2))
    queue.push([BlockId(2)])
    assert queue.pop(4) == [1, 3, 4, 2]
    with pytest.raises(IndexError, match="1 blocks wanted, 0 free"):
        queue.pop(1)


def test_groups_keep_their_order_at_either_end() -> None:
    queue = FreeBlockQueue(5)
    queue.pop(5)
    queue.push([BlockId(5)])
    queue.push_front([BlockId(3), BlockId(4)])
    queue.push_front([BlockId(1), BlockId(2)])
    queue.push_front([])
    assert list(queue) == [1, 2, 3, 4, 5]
