"""KV groups: layers that share block tables, and how far back their tokens look."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from scheduler_svc.core.step_plan import Int32Array


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers that see the same tokens: all before, the latest ones, or those of a chunk.

    A block that no token to come can see is not held: its place in the table is the null block.
    """

    window: int = 0
    """Tokens a token sees, itself included. 0: no window."""

    chunk: int = 0
    """A token sees those of its own chunk of so many. 0: no chunks."""

    @property
    def sees_all(self) -> bool:
        """A token sees all before it."""
        return not self.window and not self.chunk

    def first_seen(self, position: int) -> int:
        """Return the first position that the token at `position` sees."""
        if self.window:
            return max(0, position - self.window + 1)
        return position // self.chunk * self.chunk if self.chunk else 0

    def num_unseen_blocks(self, num_computed: int, block_size: int) -> int:
        """Return how many leading blocks no token behind the computed ones can see."""
        return self.first_seen(num_computed) // block_size

    def nums_unseen_blocks(self, num_computed: Int32Array, block_size: int) -> Int32Array:
        """Return `num_unseen_blocks` of each row of a group that does not see all. Shapes: [R]."""
        if self.window:
            first = np.maximum(num_computed - (self.window - 1), 0)
        else:
            first = num_computed // self.chunk * self.chunk
        unseen: Int32Array = first // block_size
        return unseen

    def longest_hit(self, is_cached: Callable[[int], bool], limit: int, block_size: int) -> int:
        """Return the longest prefix, of at most `limit` blocks, behind which a request can go on.

        Of a window only the blocks that the next token sees must be cached; of a full prefix all.
        `is_cached` says whether the block at an index of the table can be hit.

        Cost: O(limit).
        """
        if self.sees_all:
            return next((i for i in range(limit) if not is_cached(i)), limit)
        run_end = run = limit
        while run_end and run > self.num_unseen_blocks(run_end * block_size, block_size):
            if is_cached(run - 1):
                run -= 1
            else:
                run_end = run = run - 1
        return run_end

    def most_blocks(self, num_tokens: int, num_in_flight: int, block_size: int) -> int:
        """Return the most blocks that a request of so many tokens holds at a time.

        It holds what its earliest token in flight sees, up to the latest one in flight, and one
        block more where that need not begin with a block.
        """
        whole = -(-num_tokens // block_size)
        if self.sees_all:
            return whole
        span = min((self.window - 1 if self.window else self.chunk) + num_in_flight, num_tokens)
        begins_inside = bool(self.window or self.chunk % block_size)
        return min(-(-span // block_size) + begins_inside, whole)


FULL_ATTENTION = (KvGroup(),)
"""The groups of a model whose layers all see all tokens."""


def longest_common_hit(
    groups: Sequence[KvGroup],
    is_cached: Callable[[int, int], bool],
    limit: int,
    block_size: int,
) -> int:
    """Return the longest prefix, of at most `limit` blocks, behind which all groups can go on.

    `is_cached` says whether the block at (group, index of the table) can be hit.
    """
    length, agreed = limit, 0
    while agreed < len(groups):
        agreed = 0
        for number, group in enumerate(groups):
            found = group.longest_hit(partial(is_cached, number), length, block_size)
            agreed = agreed + 1 if found == length else 1
            length = found
    return length
