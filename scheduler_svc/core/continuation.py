"""The next tokens of those who run, and whose blocks are taken when they run out."""

import numpy as np

from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.departure import preempt
from scheduler_svc.core.free_block_queue import BlockId
from scheduler_svc.core.rows import Rows
from scheduler_svc.core.state import SchedulerState
from scheduler_svc.core.step_draft import StepDraft
from scheduler_svc.core.step_plan import IndexArray, Int32Array


def continue_running(state: SchedulerState, draft: StepDraft, pool: BlockPool, now_ns: int) -> None:
    """Give running requests their next tokens, preempting victims if blocks run out."""
    rows, block_size, most = state.rows, state.limits.block_size, state.limits.max_row_tokens
    while True:
        known = rows.num_tokens + rows.num_pending
        count = np.minimum(known - rows.num_computed, most)
        # A row whose last token is already on its way has nothing left to compute.
        count *= known < rows.limit
        num_tokens = int(count.sum())
        if num_tokens > draft.budget:
            _cut(count, rows.order, draft.budget)
            num_tokens = draft.budget
        reached = rows.num_computed + count
        growing = (reached > rows.num_blocks * block_size).nonzero()[0]
        if not len(growing):
            break
        needed = -(-reached[growing] // block_size) - rows.num_blocks[growing]
        num_needed = int(needed.sum())
        if num_needed <= pool.num_free:
            _grow(rows, draft, growing, needed, pool.allocate(num_needed))
            break
        preempt(state, state.choose_victim(rows.running, rows, pool, block_size), now_ns)
        draft.num_preempted += 1
    draft.num_new = count
    draft.take(num_tokens)


def _cut(count: Int32Array, order: IndexArray, budget: int) -> None:
    """Cut the tokens of rows where the budget ends, which goes to the first in order."""
    wanted = count[order]
    before = np.cumsum(wanted) - wanted
    count[order] = np.clip(budget - before, 0, wanted)


def _grow(
    rows: Rows, draft: StepDraft, growing: IndexArray, needed: Int32Array, blocks: list[BlockId]
) -> None:
    """Give rows `needed` blocks each. Shapes: growing and needed [G]; blocks: their sum."""
    rows.num_blocks[growing] += needed
    gaining = growing if len(blocks) == len(growing) else growing.repeat(needed)
    for request, block in zip(rows.owners_of(gaining), blocks, strict=True):
        request.blocks.append(block)
    draft.appended_rows += gaining.tolist()
    draft.appended_blocks += blocks
