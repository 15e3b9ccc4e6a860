"""The next tokens of those who run, and whose blocks are taken when they run out."""

import numpy as np

from scheduler_svc.core.beam_rows import preemptible
from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.copy_on_write import copy_tails, rows_to_copy
from scheduler_svc.core.departure import preempt
from scheduler_svc.core.free_block_queue import BlockId
from scheduler_svc.core.group_blocks import give_back_unseen
from scheduler_svc.core.request import Request
from scheduler_svc.core.rows import Rows
from scheduler_svc.core.state import SchedulerState
from scheduler_svc.core.step_draft import StepDraft
from scheduler_svc.core.step_plan import IndexArray, Int32Array

_NOBODY: IndexArray = np.zeros(0, dtype=np.intp)


def continue_running(state: SchedulerState, draft: StepDraft, pool: BlockPool, now_ns: int) -> None:
    """Give running requests their next tokens; if blocks run out, rows pause or lose theirs."""
    rows, block_size, most = state.rows, state.limits.block_size, state.limits.max_row_tokens
    paused, num_groups = _NOBODY, pool.num_groups
    if pool.has_windows:
        give_back_unseen(rows, state.journal, pool, block_size)
    while True:
        known = rows.num_tokens + rows.num_pending
        count = np.minimum(known - rows.num_computed, most)
        # A row whose last token is already on its way has nothing left to compute.
        count *= known < rows.limit
        if len(paused):
            count[paused] = 0
        if len(draft.held):
            count[draft.held] = 0
        num_tokens = int(count.sum())
        if num_tokens > draft.budget:
            _cut(count, rows.order, draft.budget)
            num_tokens = draft.budget
        reached = rows.num_computed + count
        growing = (reached > rows.num_blocks * block_size).nonzero()[0]
        due = rows_to_copy(state, pool, count) if state.shared_tails else []
        if not len(growing) and not due:
            break
        needed = -(-reached[growing] // block_size) - rows.num_blocks[growing]
        num_needed = int(needed.sum())
        if (num_needed + len(due)) * num_groups <= pool.num_free:
            copy_tails(rows, draft, pool, due)
            grow(rows, draft, growing, needed, pool.allocate(num_needed * num_groups), num_groups)
            break
        victim = state.choose_victim(preemptible(state, rows.running), rows, pool, block_size)
        [cost] = state.choose_victim.costs([victim], rows, pool, block_size)
        late = _latecomers(rows, growing, needed, due, pool.num_free // num_groups)
        num_paused = len(paused) + len(late)
        num_running = int(np.count_nonzero(count)) - len(late)
        if num_running and _can_wait(state, late, num_paused, victim, cost):
            paused = np.concatenate([paused, late])
            continue
        state.pause_debt = max(0, state.pause_debt - cost)
        preempt(state, victim, now_ns)
        draft.num_preempted += 1
        paused = _NOBODY
    draft.num_new = count
    draft.take(num_tokens)
    if state.shared_tails:
        state.shared_tails -= set(np.flatnonzero(count).tolist())
    draft.num_paused = len(paused)
    state.counters.pauses += len(paused)
    state.pause_debt += len(paused) * state.choose_victim.pause_tokens


def _latecomers(
    rows: Rows, growing: IndexArray, needed: Int32Array, due: list[int], num_free: int
) -> IndexArray:
    """Return the rows that find no block left when the first in order take theirs.

    Some are growing by the blocks they need, some are due to copy one; all that of each group.
    """
    wanted = np.zeros_like(rows.num_blocks)
    wanted[growing] = needed
    wanted[due] += 1
    wanted = wanted[rows.order]
    return rows.order[(wanted > 0) & (np.cumsum(wanted) > num_free)]


def _can_wait(
    state: SchedulerState, late: IndexArray, num_paused: int, victim: Request, cost: int
) -> bool:
    """Whether rows rather pause for a step, hoping that somebody ends, than cost a victim.

    Rent or buy: all pauses together weigh at most what preemptions cost, and one more. Nobody
    waits for a victim of worse priority, be it for a block or in the queue.
    """
    debt = state.pause_debt + num_paused * state.choose_victim.pause_tokens
    if not state.choose_victim.pause_tokens or debt >= cost:
        return False
    owners = state.rows.owners_of(late)
    head = next(state.waiting.in_turn(), None)
    return all(owner.priority >= victim.priority for owner in owners) and (
        head is None or not state.waiting.yielding_to(head, state.rows.running)
    )


def _cut(count: Int32Array, order: IndexArray, budget: int) -> None:
    """Cut the tokens of rows where the budget ends, which goes to the first in order."""
    wanted = count[order]
    before = np.cumsum(wanted) - wanted
    count[order] = np.clip(budget - before, 0, wanted)


def grow(
    rows: Rows,
    draft: StepDraft,
    growing: IndexArray,
    needed: Int32Array,
    blocks: list[BlockId],
    num_groups: int,
) -> None:
    """Give rows `needed` columns of blocks each.

    Shapes: growing and needed [G]; blocks: their sum, times the KV groups.
    """
    rows.num_blocks[growing] += needed
    gaining = growing if len(blocks) == len(growing) * num_groups else growing.repeat(needed)
    owners = rows.owners_of(gaining)
    if num_groups == 1:
        for request, block in zip(owners, blocks, strict=True):
            request.blocks.append(block)
    else:
        for place, request in enumerate(owners):
            request.blocks += blocks[place * num_groups : (place + 1) * num_groups]
    draft.appended_rows += gaining.tolist()
    draft.appended_blocks += blocks
