"""Which idle block dies next. Empty blocks are no matter of these policies: they go first."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from scheduler_svc.core.free_block_queue import BlockId, FreeBlockQueue

MAX_USES = 3
"""Hits that count. More would only keep what was popular long ago."""

NEWCOMERS_SHARE = 10
"""One idle block in so many may be one that was never hit, before those that were hit die."""


class EvictionPolicy(Protocol):
    """The idle blocks with content, in the order of their deaths.

    Cost of every method: O(1) per block, amortized.
    """

    def __len__(self) -> int:
        """Return the number of idle blocks."""

    def __iter__(self) -> Iterator[BlockId]:
        """Yield each idle block once."""

    def add(self, blocks: Sequence[BlockId]) -> None:
        """Take blocks that lost their last user, in the order in which they shall die."""

    def remove(self, block: BlockId) -> None:
        """Let go of an idle block: it is hit, pinned, or loses its name."""

    def evict(self, count: int) -> list[BlockId]:
        """Choose `count` of the idle blocks, no more than there are, and let go of them."""

    def note_published(self, block: BlockId, *, came_back: bool) -> None:
        """Hear that a block got a name; `came_back`: one that was evicted lately."""

    def note_hits(self, blocks: Iterable[BlockId]) -> None:
        """Hear that a request found its prefix in these blocks, idle or in use."""


class LruEviction:
    """The block that was used last, longest ago, dies first. Of a prefix, the end."""

    __slots__ = ("_queue",)

    def __init__(self, num_blocks: int) -> None:
        self._queue = FreeBlockQueue(num_blocks, linked=False)

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[BlockId]:
        return iter(self._queue)

    def add(self, blocks: Sequence[BlockId]) -> None:
        """See EvictionPolicy."""
        self._queue.push(blocks)

    def remove(self, block: BlockId) -> None:
        """See EvictionPolicy."""
        self._queue.remove(block)

    def evict(self, count: int) -> list[BlockId]:
        """See EvictionPolicy."""
        return self._queue.pop(count)

    def note_published(self, block: BlockId, *, came_back: bool) -> None:
        """Nothing: only the end of its use counts."""

    def note_hits(self, blocks: Iterable[BlockId]) -> None:
        """Nothing: only the end of its use counts."""


class ReuseAwareEviction:
    """Blocks that were never hit die first, then those hit least; of equals the longest idle.

    Two queues in order of release. Newcomers have not been hit since they got their names,
    nor did the names come back after an eviction; a scan passes through them and leaves the
    others alone. They keep a tenth of the idle blocks, or nothing new could prove itself. In
    the other queue each further hit is worth one more way through it.

    Source: S3-FIFO, Yang et al. 2023 (doi:10.1145/3600006.3613147): two queues, names of the
        evicted, and uses up to 3; in order of release, as in 2Q, not of entry.
    """

    __slots__ = ("_newcomers", "_proven", "_uses")

    def __init__(self, num_blocks: int) -> None:
        self._newcomers = FreeBlockQueue(num_blocks, linked=False)
        self._proven = FreeBlockQueue(num_blocks, linked=False)
        self._uses = bytearray(num_blocks + 1)

    def __len__(self) -> int:
        return len(self._newcomers) + len(self._proven)

    def __iter__(self) -> Iterator[BlockId]:
        yield from self._newcomers
        yield from self._proven

    def add(self, blocks: Sequence[BlockId]) -> None:
        """See EvictionPolicy."""
        uses = self._uses
        self._newcomers.push([block for block in blocks if not uses[block]])
        self._proven.push([block for block in blocks if uses[block]])

    def remove(self, block: BlockId) -> None:
        """See EvictionPolicy."""
        (self._proven if self._uses[block] else self._newcomers).remove(block)

    def evict(self, count: int) -> list[BlockId]:
        """See EvictionPolicy."""
        newcomers, proven, uses = self._newcomers, self._proven, self._uses
        taken: list[BlockId] = []
        while len(taken) < count:
            if NEWCOMERS_SHARE * len(newcomers) >= len(newcomers) + len(proven):
                taken += newcomers.pop(1)
                continue
            blocks = proven.pop(1)
            if uses[blocks[0]] > 1:
                uses[blocks[0]] -= 1
                proven.push(blocks)
            else:
                taken += blocks
        return taken

    def note_published(self, block: BlockId, *, came_back: bool) -> None:
        """See EvictionPolicy."""
        self._uses[block] = came_back

    def note_hits(self, blocks: Iterable[BlockId]) -> None:
        """See EvictionPolicy. The blocks are not idle at this moment."""
        uses = self._uses
        for block in blocks:
            if uses[block] < MAX_USES:
                uses[block] += 1


EvictionPolicyMaker = Callable[[int], EvictionPolicy]
"""Makes a policy for a pool of so many usable blocks."""

EVICTION_POLICIES: Mapping[str, EvictionPolicyMaker] = {
    "lru": LruEviction,
    "reuse-aware": ReuseAwareEviction,
}
