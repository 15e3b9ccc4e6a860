"""How long blocks live, and how they are reused: facts about a sample of them.

Source: the reference engine's KV residency metrics, exactly; a life begins when a block is
    allocated and ends when it is handed out again, with a name or without.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log

from scheduler_svc.core.free_block_queue import BlockId

NUM_ACCESSES = 4
"""Latest hits of a life that are kept."""


@dataclass(frozen=True, slots=True)
class BlockLife:
    """A life that has ended. Nanoseconds."""

    lifetime_ns: int
    """From allocation to the next."""

    idle_ns: int
    """From the latest hit, or the allocation, to the end."""

    reuse_gaps_ns: tuple[int, ...]
    """Between the latest four hits: none to three."""


class Residency:
    """Watches a share `sample` of all allocations.

    `draw` gives uniform numbers in [0, 1); it is asked once per sampled block, for the number of
    blocks to let pass.

    Lives that ended pile up until `take`: no more than blocks were allocated in between.
    """

    __slots__ = ("_draw", "_ended", "_lives", "_pass", "_sample")

    def __init__(self, sample: float, draw: Callable[[], float]) -> None:
        if not 0 < sample <= 1:
            raise ValueError(f"sample is {sample}, must be above 0 and at most 1")
        self._sample = sample
        self._draw = draw
        # Per block: its birth, then its latest hits.
        self._lives: dict[BlockId, list[int]] = {}
        self._ended: list[BlockLife] = []
        self._pass = self._num_to_pass()

    def allocated(self, blocks: Sequence[BlockId], now_ns: int) -> None:
        """Note that blocks were handed out: their lives before end, some new ones are watched.

        Cost: O(1) per block; 30 ns for one that is not watched.
        """
        lives = self._lives
        if lives:
            for block in blocks:
                if block in lives:
                    self._ended.append(_life(lives.pop(block), now_ns))
        while self._pass < len(blocks):
            lives[blocks[self._pass]] = [now_ns]
            self._pass += 1 + self._num_to_pass()
        self._pass -= len(blocks)

    def hit(self, blocks: Sequence[BlockId], now_ns: int) -> None:
        """Note that a request found its prefix in blocks."""
        lives = self._lives
        if not lives:
            return
        for block in blocks:
            if (life := lives.get(block)) is not None:
                life.append(now_ns)
                if len(life) > 1 + NUM_ACCESSES:
                    del life[1]

    def take(self) -> list[BlockLife]:
        """Take the lives that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def clear(self) -> None:
        """Forget the lives that have not ended, since the cache was emptied."""
        self._lives.clear()

    def _num_to_pass(self) -> int:
        """Draw how many blocks go by until the next sampled one: a geometric number."""
        if self._sample == 1:
            return 0
        return int(log(1 - self._draw()) / log(1 - self._sample))


def _life(stamps: list[int], now_ns: int) -> BlockLife:
    hits = stamps[1:]
    gaps = tuple(later - earlier for earlier, later in pairwise(hits))
    return BlockLife(now_ns - stamps[0], now_ns - stamps[-1], gaps)
