"""A draft becomes a plan: rows advance, and the journal knows the step."""

from itertools import repeat

import numpy as np

from scheduler_svc.core.asked import note_asked
from scheduler_svc.core.beam_search import num_candidates
from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.drafting import expect_drafts, note_drafts
from scheduler_svc.core.embedded_span import not_computed
from scheduler_svc.core.family_results import note_families
from scheduler_svc.core.forks import forked_rows
from scheduler_svc.core.journal import FlyingStep
from scheduler_svc.core.reports import Asks
from scheduler_svc.core.request import Request
from scheduler_svc.core.rows import Rows
from scheduler_svc.core.state import SchedulerState
from scheduler_svc.core.step_draft import StepDraft
from scheduler_svc.core.step_plan import EMPTY, AdmittedRow, Int32Array, StepPlan


def seal(state: SchedulerState, draft: StepDraft, pool: BlockPool) -> StepPlan:
    """Advance the rows, enter the step in the journal and return the plan."""
    rows, count = state.rows, draft.num_new
    exceptions = _find_exceptions(rows, count)
    rows.num_computed += count
    state.waiting.charge_rows(rows.account, count)
    groups = repeat(pool.num_groups)
    admitted = tuple(map(_describe, repeat(state), draft.admitted, draft.admitted_num_new, groups))
    for row in admitted:
        count[row.row] = row.num_new_tokens
    rows.num_last_new = count
    ran = count.nonzero()[0]
    if draft.drafts:
        expect_drafts(rows, draft.drafts)
    samples = (rows.num_computed == rows.num_tokens + rows.num_pending) & (count > 0)
    rows.num_pending += samples
    step = FlyingStep(state.next_step_id, ran, rows.generation[ran], samples[ran])
    step.published += draft.published
    if np.count_nonzero(rows.asks):
        note_asked(state, step)
    if draft.drafts:
        note_drafts(rows, draft.drafts, step)
    if state.families:
        note_families(state, step)
    forked = forked_rows(state, draft) if state.pending_forks or draft.cuts else ()
    state.journal.add(step)
    if draft.num_tokens > len(ran):
        # A prompt may have filled blocks; what a decode fills, its result names.
        state.prefixes.publish_filled(pool)
    plan = draft.seal(
        state.next_step_id,
        reset=state.reset,
        num_rows=len(ran),
        released_rows=[] if state.reset else state.released_rows,
        forked=forked,
        exceptions=exceptions,
        admitted_rows=admitted,
        serial_rows=[*step.families, *step.drafts],
    )
    state.released_rows.clear()
    state.reset = False
    state.next_step_id += 1
    return plan


def _find_exceptions(rows: Rows, count: Int32Array) -> tuple[Int32Array, Int32Array, Int32Array]:
    """Return the rows that do not advance by one token, the tokens they have and those they run."""
    odd = (count != np.minimum(rows.num_last_new, 1)).nonzero()[0]
    if not len(odd):
        return EMPTY, EMPTY, EMPTY
    return odd.astype(np.int32), rows.num_computed[odd], count[odd]


def _describe(
    state: SchedulerState, request: Request, num_new: int, num_groups: int
) -> AdmittedRow:
    beam, reports, stopping = request.root.beam, request.reports, request.stopping
    asks_prompt = reports.asks(request.prompt_table) & Asks.PROMPT
    held_back = stopping.min_output_tokens > 0
    tables = np.array(request.blocks, dtype=np.int32).reshape(-1, num_groups)
    return AdmittedRow(
        row=state.rows.row_of(request),
        request_id=request.request_id,
        tokens=np.frombuffer(request.tokens, dtype=np.int32),
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=request.admitted_tokens,
        num_new_tokens=num_new,
        block_tables=tuple(tables.T),
        sampling=request.sampling,
        sequence_index=request.index,
        num_samples=request.num_samples,
        num_candidates=num_candidates(beam, stopping) if beam else reports.logprobs or 0,
        logprobs=reports.logprobs is not None,
        prompt_logprobs=reports.prompt_logprobs if asks_prompt else None,
        pooling=reports.pooling,
        min_output_tokens=stopping.min_output_tokens,
        stop_token_ids=stopping.eos_token_ids | stopping.stop_token_ids
        if held_back
        else frozenset(),
        adapter=request.adapter_slot,
        embeddings=not_computed(request.embeddings, request.admitted_tokens),
    )
