"""Copy-on-write: a partly filled last block that several rows share is copied before one writes.

Rows that were forked share every block. Full blocks are never written again. Into the last one
each row writes its next token; whoever still shares it then gets a copy, and the last owner
writes in place.
"""

from collections import Counter

from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.free_block_queue import BlockId
from scheduler_svc.core.request import Request
from scheduler_svc.core.rows import Rows
from scheduler_svc.core.state import SchedulerState
from scheduler_svc.core.step_draft import StepDraft
from scheduler_svc.core.step_plan import Int32Array


def rows_to_copy(state: SchedulerState, pool: BlockPool, num_new: Int32Array) -> list[int]:
    """Return the rows whose new tokens would go into blocks that others hold too.

    Shape: num_new [all rows]. The last owner of a block is not among them. Rows share the last
    blocks of all KV groups, or none: every group sees the block it writes.
    """
    copied = Counter[BlockId]()
    due = []
    for row in sorted(state.shared_tails):
        if num_new[row]:
            block = state.rows.owner(row).blocks[-1]
            if pool.num_users(block) - copied[block] > 1:
                copied[block] += 1
                due.append(row)
    return due


def copy_tails(rows: Rows, draft: StepDraft, pool: BlockPool, due: list[int]) -> None:
    """Give rows blocks of their own in place of the last ones, and plan the copies."""
    num_groups = pool.num_groups
    granted = pool.allocate(len(due) * num_groups)
    for place, row in enumerate(due):
        blocks = rows.owner(row).blocks
        shared = blocks[-num_groups:]
        fresh = granted[place * num_groups : (place + 1) * num_groups]
        blocks[-num_groups:] = fresh
        pool.release(shared[::-1])
        draft.copies[row] = (shared, fresh)
        draft.cuts[row] = int(rows.num_blocks[row]) - 1
        draft.appended_rows.append(row)
        draft.appended_blocks += fresh


def num_pending_copies(state: SchedulerState, pool: BlockPool) -> int:
    """Return how many blocks the rows that run will still need for copies, over all groups."""
    tails = {state.rows.owner(row).blocks[-1] for row in state.shared_tails}
    unforked = sum(
        num_copies_after_fork(root, state.limits.block_size)
        for root in state.families.values()
        if root.awaits_fork
    )
    return (unforked + sum(pool.num_users(block) - 1 for block in tails)) * pool.num_groups


def num_copies_after_fork(root: Request, block_size: int) -> int:
    """Return how many blocks of each group a family will need for copies once it is forked.

    None if the prompt fills its last block, or if all end with their first tokens.
    """
    if root.num_prompt_tokens % block_size == 0 or root.limit <= root.num_prompt_tokens + 1:
        return 0
    return sum(1 for each in root.family if each.finish_reason is None) - 1
