"""A draft becomes a plan: rows advance, and the journal knows the step."""

import numpy as np

from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.journal import FlyingStep
from scheduler_svc.core.request import Request
from scheduler_svc.core.state import SchedulerState
from scheduler_svc.core.step_draft import StepDraft
from scheduler_svc.core.step_plan import AdmittedRow, StepPlan


def seal(state: SchedulerState, draft: StepDraft, pool: BlockPool) -> StepPlan:
    """Advance the rows, enter the step in the journal and return the plan."""
    rows, count = state.rows, draft.num_new
    odd = np.flatnonzero(count != (rows.num_last_new > 0))
    exceptions = (odd.astype(np.int32), rows.num_computed[odd], count[odd])
    rows.num_computed += count
    state.waiting.charge_rows(rows.account, count)
    admitted = tuple(
        _describe(state, request, num_new)
        for request, num_new in zip(draft.admitted, draft.admitted_num_new, strict=True)
    )
    for row in admitted:
        count[row.row] = row.num_new_tokens
    rows.num_last_new = count
    ran = np.flatnonzero(count)
    samples = (rows.num_computed == rows.num_tokens + rows.num_pending) & (count > 0)
    rows.num_pending += samples
    step = FlyingStep(state.next_step_id, ran, rows.generation[ran], samples[ran])
    step.published += draft.published
    state.journal.add(step)
    state.prefixes.publish_filled(pool)
    plan = draft.seal(
        state.next_step_id,
        reset=state.reset,
        num_rows=len(ran),
        released_rows=[] if state.reset else state.released_rows,
        exceptions=exceptions,
        admitted_rows=admitted,
    )
    state.released_rows.clear()
    state.reset = False
    state.next_step_id += 1
    return plan


def _describe(state: SchedulerState, request: Request, num_new: int) -> AdmittedRow:
    return AdmittedRow(
        row=state.rows.row_of(request),
        request_id=request.request_id,
        tokens=np.frombuffer(request.tokens, dtype=np.int32),
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=request.admitted_tokens,
        num_new_tokens=num_new,
        block_tables=(np.array(request.blocks, dtype=np.int32),),
        sampling=request.sampling,
    )
