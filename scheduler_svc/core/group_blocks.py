"""Blocks of KV groups: which a hit shares, which a row gives back, and how many one needs.

A request's tables are equally long and lie column by column in one list, a block per group:
column c of group g is `blocks[c * num_groups + g]`, the null block where the group holds none.
"""

from collections.abc import Sequence

import numpy as np

from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.free_block_queue import NULL_BLOCK, BlockId
from scheduler_svc.core.journal import GivenBack, Journal
from scheduler_svc.core.kv_groups import KvGroup
from scheduler_svc.core.limits import Limits
from scheduler_svc.core.request import Request
from scheduler_svc.core.rows import Rows


def without_unseen(
    blocks: Sequence[BlockId], groups: Sequence[KvGroup], block_size: int
) -> list[BlockId]:
    """Return columns with the null block wherever no token behind them all can see."""
    num_groups = len(groups)
    seen = list(blocks)
    num_tokens = len(blocks) // num_groups * block_size
    for number, group in enumerate(groups):
        num_unseen = group.num_unseen_blocks(num_tokens, block_size)
        seen[number : num_unseen * num_groups : num_groups] = [NULL_BLOCK] * num_unseen
    return seen


def give_back_unseen(rows: Rows, journal: Journal, pool: BlockPool, block_size: int) -> None:
    """Release the blocks that the next token of each row, and those behind it, cannot see.

    Steps in flight may still read them: workers run steps in order, so whoever gets such a block
    writes it after they have. Their names stay.

    Cost: nothing for groups that see all; O(rows) numpy for each other.
    """
    flying = journal.newest
    for number, group in enumerate(pool.groups):
        if group.sees_all:
            continue
        unseen = group.nums_unseen_blocks(rows.num_computed, block_size)
        before = group.nums_unseen_blocks(rows.num_computed - rows.num_last_new, block_size)
        for row in np.flatnonzero(unseen > before).tolist():
            request = rows.owner(row)
            gone = _take_out(request, number, int(unseen[row]), pool.num_groups)
            pool.release(gone)
            if flying is not None:
                num_hit = request.admitted_tokens // block_size
                flying.given_back += [
                    GivenBack(request, block, int(unseen[row]) - 1 - place >= num_hit)
                    for place, block in enumerate(gone)
                ]


def _take_out(request: Request, group: int, num_unseen: int, num_groups: int) -> list[BlockId]:
    """Put null in place of a table's first blocks; return those it held, the later first."""
    blocks, gone = request.blocks, []
    place = (num_unseen - 1) * num_groups + group
    while place >= 0 and blocks[place] != NULL_BLOCK:
        gone.append(blocks[place])
        blocks[place] = NULL_BLOCK
        place -= num_groups
    return gone


def num_wanted(num_tokens: int, hits: Sequence[BlockId], limits: Limits, pool: BlockPool) -> int:
    """Return how many free blocks a request takes that waits with so many tokens, and these hits.

    A group with a window takes at most what it holds at a time.
    """
    block_size, num_groups = limits.block_size, pool.num_groups
    num_columns = -(-num_tokens // block_size) - len(hits) // num_groups
    if not pool.has_windows:
        return num_columns * num_groups + pool.count_idle(hits)
    return sum(
        min(
            num_columns + pool.count_idle(hits[number::num_groups]),
            group.most_blocks(num_tokens, limits.max_step_row_tokens, block_size),
        )
        for number, group in enumerate(pool.groups)
    )


def num_lacking(num_tokens: int, num_computed: int, num_columns: int, limits: Limits,
                pool: BlockPool) -> int:  # fmt: skip
    """Return how many more blocks a row will take for the tokens it knows.

    It has `num_columns` in its tables, but for what a token behind the computed ones cannot see.
    """
    block_size = limits.block_size
    lacking = -(-num_tokens // block_size) - num_columns
    if lacking <= 0:
        return 0
    total = 0
    for group in pool.groups:
        most = group.most_blocks(num_tokens, limits.max_step_row_tokens, block_size)
        held = num_columns - group.num_unseen_blocks(num_computed, block_size)
        total += max(0, min(lacking, most - held))
    return total


def num_promised(rows: Rows, limits: Limits, pool: BlockPool) -> int:
    """Return how many blocks the rows that run will still take for the tokens they know."""
    lacking = -(-rows.num_tokens // limits.block_size) - rows.num_blocks
    if not pool.has_windows:
        return int(np.maximum(lacking, 0).sum()) * pool.num_groups
    return sum(
        num_lacking(
            int(rows.num_tokens[row]),
            int(rows.num_computed[row]),
            int(rows.num_blocks[row]),
            limits,
            pool,
        )
        for row in np.flatnonzero(lacking > 0).tolist()
    )


def num_shared_columns(blocks: Sequence[BlockId], pool: BlockPool) -> int:
    """Return behind how many columns a request could go on if it gave its blocks back now.

    What others hold too stays. If a group sees all, its blocks tell: they are a prefix.
    """
    groups, num_groups = pool.groups, pool.num_groups
    for number, group in enumerate(groups):
        if group.sees_all:
            return pool.num_shared(blocks[number::num_groups] if num_groups > 1 else blocks)
    shared = [block == NULL_BLOCK or pool.is_shared(block) for block in blocks]
    end = shared.index(False) // num_groups if False in shared else len(blocks) // num_groups
    last = blocks[(end - 1) * num_groups : end * num_groups] if end else []
    return end if any(last) else 0
