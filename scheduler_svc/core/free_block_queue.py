"""The free list: which blocks may be handed out next."""

from collections.abc import Iterator, Sequence
from typing import NewType

BlockId = NewType("BlockId", int)

NULL_BLOCK = BlockId(0)
"""Pads block tables. Never handed out, named or freed."""


class FreeBlockQueue:
    """A queue of block ids that can also give up an id from its middle.

    A released block may still hold a prefix that another request wants. It waits here
    until someone shares it again (`remove`) or needs the space (`pop`).

    The queue is a ring threaded through two flat lists. Index 0, the null block, is the
    sentinel that closes the ring: its next is the head, its previous the tail. No object is
    made per block, so the garbage collector has nothing to walk.

    Cost: O(1) per id moved.
    Invariant: an id is linked at most once. Callers keep it; `BlockPool.check` proves it.
    """

    __slots__ = ("_next", "_prev", "_size")

    def __init__(self, num_blocks: int, *, linked: bool = True) -> None:
        """Link the ids 1 .. num_blocks in order, or none of them."""
        self._next = [BlockId(i) for i in (*range(1, num_blocks + 1), 0)]
        self._prev = [BlockId(i) for i in (num_blocks, *range(num_blocks))]
        self._size = num_blocks
        if not linked:
            self._next[NULL_BLOCK] = self._prev[NULL_BLOCK] = NULL_BLOCK
            self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[BlockId]:
        """Yield the ids from head to tail."""
        block = self._next[NULL_BLOCK]
        while block != NULL_BLOCK:
            yield block
            block = self._next[block]

    def pop(self, count: int) -> list[BlockId]:
        """Take `count` ids from the head.

        Raises: IndexError if fewer are in the queue; none is taken then.
        """
        if count > self._size:
            raise IndexError(f"{count} blocks wanted, {self._size} free")
        follow, block = self._next, self._next[NULL_BLOCK]
        taken = []
        for _ in range(count):
            taken.append(block)
            block = follow[block]
        follow[NULL_BLOCK], self._prev[block] = block, NULL_BLOCK
        self._size -= count
        return taken

    def push(self, blocks: Sequence[BlockId]) -> None:
        """Add ids at the tail, in the order given."""
        self._link(self._prev[NULL_BLOCK], blocks)

    def push_front(self, blocks: Sequence[BlockId]) -> None:
        """Add ids before the head, in the order given."""
        self._link(NULL_BLOCK, blocks)

    def remove(self, block: BlockId) -> None:
        """Take one id from wherever it stands. It must be in the queue."""
        before, after = self._prev[block], self._next[block]
        self._next[before], self._prev[after] = after, before
        self._size -= 1

    def _link(self, before: BlockId, blocks: Sequence[BlockId]) -> None:
        follow, precede = self._next, self._prev
        after = follow[before]
        for block in blocks:
            follow[before], precede[block] = block, before
            before = block
        follow[before], precede[after] = after, before
        self._size += len(blocks)
