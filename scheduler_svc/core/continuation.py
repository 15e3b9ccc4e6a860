"""The next tokens of those who run, and whose blocks are taken when they run out."""

import numpy as np

from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.departure import preempt
from scheduler_svc.core.state import SchedulerState
from scheduler_svc.core.step_draft import StepDraft


def continue_running(state: SchedulerState, draft: StepDraft, pool: BlockPool, now_ns: int) -> None:
    """Give running requests their next tokens, preempting victims if blocks run out."""
    rows, block_size, most = state.rows, state.limits.block_size, state.limits.max_row_tokens
    while True:
        order = rows.order
        known = rows.num_tokens[order] + rows.num_pending[order]
        computed = rows.num_computed[order]
        # A row whose last token is already on its way has nothing left to compute.
        gap = np.where(known < rows.limit[order], np.minimum(known - computed, most), 0)
        before = np.cumsum(gap) - gap
        count = np.clip(gap, 0, np.maximum(draft.budget - before, 0)).astype(np.int32)
        held = rows.num_blocks[order]
        needed = np.where(count > 0, -(-(computed + count) // block_size) - held, 0)
        if int(needed.sum()) <= pool.num_free:
            break
        preempt(state, state.choose_victim(rows.running, rows, pool, block_size), now_ns)
        draft.num_preempted += 1
    draft.rows, draft.num_new = order, count
    draft.budget -= draft.num_running_tokens
    growing = np.flatnonzero(needed)
    if len(growing):
        _grow(state, draft, pool, order[growing].tolist(), needed[growing].tolist())


def _grow(
    state: SchedulerState, draft: StepDraft, pool: BlockPool, rows: list[int], counts: list[int]
) -> None:
    fresh = iter(pool.allocate(sum(counts)))
    for row, count in zip(rows, counts, strict=True):
        blocks = [next(fresh) for _ in range(count)]
        state.rows.owner(row).blocks += blocks
        state.rows.num_blocks[row] += count
        draft.appended_rows += [row] * count
        draft.appended_blocks += blocks
