"""Who of those that wait gets a row and blocks in the step being planned."""

import numpy as np

from scheduler_svc.core.beam_rows import (
    LanePlan,
    admit_lanes,
    freed_blocks,
    lanes_of,
    num_lane_blocks,
    plan_lanes,
    preemptible,
)
from scheduler_svc.core.beams import begin_search
from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.copy_on_write import num_copies_after_fork, num_pending_copies
from scheduler_svc.core.departure import end, preempt
from scheduler_svc.core.free_block_queue import BlockId
from scheduler_svc.core.group_blocks import num_lacking, num_promised, num_wanted
from scheduler_svc.core.request import FinishReason, Request
from scheduler_svc.core.sibling_blocks import find_blocks, note_borrowed
from scheduler_svc.core.skip_ahead import SkipAhead
from scheduler_svc.core.state import SchedulerState
from scheduler_svc.core.step_draft import StepDraft


def admit_waiting(state: SchedulerState, draft: StepDraft, pool: BlockPool, now_ns: int) -> None:
    """Give rows to waiting requests in their turn, while everything suffices."""
    if not len(state.waiting):
        return
    _look_ahead(state, draft, pool)
    skip = SkipAhead(state.limits, now_ns)
    for request in state.waiting.in_turn():
        if request.deadline_ns is not None and request.deadline_ns <= now_ns:
            end(state, request, FinishReason.ABORT, now_ns)
            state.expired.append(request)
            continue
        if request.num_pending_tokens:
            return
        if _is_one_long_too_many(state, request, draft, pool):
            if not skip.hold(request, for_memory=False):
                return
            continue
        claimed = skip.is_head and _claim(state, request, draft, pool, now_ns)
        if draft.budget <= 0 or not state.rows.has_room:
            return
        if skip.allows(request) and _admit(state, request, draft, pool):
            state.waiting.remove(request)
            if request.first_scheduled_ns is None:
                request.first_scheduled_ns = now_ns
                request.first_step_id = state.next_step_id
            if claimed or not skip.passed():
                return
        elif not skip.hold(request, for_memory=True):
            return


def _look_ahead(state: SchedulerState, draft: StepDraft, pool: BlockPool) -> None:
    """Note what the rows that run will still need for the tokens they know."""
    rows = state.rows
    draft.promised_blocks = num_promised(rows, state.limits, pool)
    if state.families or state.shared_tails:
        draft.promised_blocks += num_pending_copies(state, pool)
    gap = rows.num_tokens - rows.num_computed
    for request, num_new in zip(draft.admitted, draft.admitted_num_new, strict=True):
        gap[rows.row_of(request)] += num_new
    draft.num_long_prefills = int(np.count_nonzero(gap > state.limits.max_row_tokens))


def _is_one_long_too_many(
    state: SchedulerState, request: Request, draft: StepDraft, pool: BlockPool
) -> bool:
    most = state.limits.max_long_prefills
    if not most or draft.num_long_prefills < most:
        return False
    num_columns = len(find_blocks(state, request, draft, pool)) // pool.num_groups
    num_hit = num_columns * state.limits.block_size
    return request.num_tokens - num_hit > state.limits.max_row_tokens


def _claim(
    state: SchedulerState, request: Request, draft: StepDraft, pool: BlockPool, now_ns: int
) -> bool:
    """Preempt running requests that yield to a waiting one, if that lets it in.

    False, and nothing changed, if it need not or does not.
    """
    rows, block_size = state.rows, state.limits.block_size
    yielding = [*preemptible(state, state.waiting.yielding_to(request, rows.running))]
    if state.pending_forks:
        yielding = [other for other in yielding if not _is_in_fork(state, other)]
    if not yielding:
        return False
    hits = find_blocks(state, request, draft, pool)
    lanes = _lanes_that_resume(state, request, pool)
    lacking = _num_blocks_wanted(state, request, hits, lanes, draft, pool) - pool.num_free
    lacking_rows, budget = _num_rows_wanted(request) - rows.num_free, draft.budget
    victims: list[Request] = []
    while lacking > 0 or lacking_rows > 0:
        if not yielding:
            return False
        victim = state.choose_victim(yielding, rows, pool, block_size)
        yielding.remove(victim)
        victims.append(victim)
        lacking -= len(freed_blocks(state, victim, pool).difference(hits))
        lacking_rows -= victim.num_reserved_rows
        for lane in lanes_of(state, victim):
            row = rows.row_of(lane)
            lacking -= _num_lacking(state, row, pool)
            lacking_rows -= 1
            budget += int(draft.num_new[row])
    if budget <= 0 or not victims:
        return False
    for victim in victims:
        for lane in lanes_of(state, victim):
            draft.drop(rows.row_of(lane))
        preempt(state, victim, now_ns)
        draft.num_preempted += 1
    _look_ahead(state, draft, pool)
    return True


def _num_blocks_wanted(
    state: SchedulerState,
    request: Request,
    hits: list[BlockId],
    lanes: list[LanePlan] | None,
    draft: StepDraft,
    pool: BlockPool,
) -> int:
    """Return how many blocks must be free to admit a request.

    Its whole known length must fit, beside those of the rows that run, or a long prompt
    would be preempted half way.
    """
    if lanes is not None:
        wanted = num_lane_blocks(state, lanes, pool)
    else:
        wanted = num_wanted(request.num_tokens, hits, state.limits, pool)
    wanted += draft.promised_blocks
    if request.awaits_fork:
        wanted += num_copies_after_fork(request, state.limits.block_size) * pool.num_groups
    if request.num_preemptions and state.rows.running:
        wanted += max(1, int(state.limits.watermark * pool.num_blocks))
    return wanted


def _admit(state: SchedulerState, request: Request, draft: StepDraft, pool: BlockPool) -> bool:
    """Give a request blocks and a row. False, and nothing changed, if they do not suffice."""
    block_size = state.limits.block_size
    if _num_rows_wanted(request) > state.rows.num_free:
        return False
    hits = find_blocks(state, request, draft, pool)
    lanes = _lanes_that_resume(state, request, pool)
    if _num_blocks_wanted(state, request, hits, lanes, draft, pool) > pool.num_free:
        return False
    if lanes is not None:
        admit_lanes(state, lanes, draft, pool)
        return True
    num_hit_columns = len(hits) // pool.num_groups
    num_hit = num_hit_columns * block_size
    gap = request.num_tokens - num_hit
    count = min(gap, draft.budget, state.limits.max_row_tokens)
    pool.hit(hits)
    num_columns = -(-(num_hit + count) // block_size)
    granted = pool.allocate((num_columns - num_hit_columns) * pool.num_groups)
    request.blocks = [*hits, *granted]
    _count_admission(state, request, num_hit, pool)
    row = state.rows.take(request, num_hit + count, num_columns)
    draft.published += state.prefixes.publish_prompt(row, request, num_hit_columns, pool)
    draft.add(request, count)
    # What it ran in this step is behind it when it takes more.
    draft.promised_blocks += _num_lacking(state, row, pool)
    if request.has_family:
        _note_family(state, request, row, draft, hits, pool)
    draft.num_long_prefills += gap > state.limits.max_row_tokens
    state.waiting.charge(request, count)
    return True


def _num_lacking(state: SchedulerState, row: int, pool: BlockPool) -> int:
    rows = state.rows
    return num_lacking(
        int(rows.num_tokens[row]),
        int(rows.num_computed[row]),
        int(rows.num_blocks[row]),
        state.limits,
        pool,
    )


def _lanes_that_resume(
    state: SchedulerState, request: Request, pool: BlockPool
) -> list[LanePlan] | None:
    """Return how the beams of a request come back, if it has any yet."""
    if request.beam is None or request.awaits_fork:
        return None
    return plan_lanes(state, state.beams[request], pool)


def _num_rows_wanted(request: Request) -> int:
    """Return how many rows must be free to admit a request: those of beams, or of a new family."""
    if not request.awaits_fork and request.beam is None:
        return 1
    return sum(1 for each in request.family if each.finish_reason is None)


def _note_family(
    state: SchedulerState,
    request: Request,
    row: int,
    draft: StepDraft,
    hits: list[BlockId],
    pool: BlockPool,
) -> None:
    """Keep rows free for the members of a family that is still to be forked.

    Its row is serial: no token is planned behind those that the prompt samples.
    """
    if not request.awaits_fork:
        note_borrowed(state, request, draft, hits)
        return
    if request.beam is not None:
        begin_search(state, request, request.beam)
    state.families[row] = request
    state.rows.limit[row] = request.num_tokens + 1
    request.num_reserved_rows = _num_rows_wanted(request) - 1
    state.rows.num_reserved += request.num_reserved_rows
    copies = num_copies_after_fork(request, state.limits.block_size)
    draft.promised_blocks += copies * pool.num_groups


def _is_in_fork(state: SchedulerState, request: Request) -> bool:
    """Whether a running request is part of a fork that this plan carries, and must not leave now.

    Beams may: all of a fork's rows leave with them.
    """
    if request.beam is not None:
        return False
    row = state.rows.row_of(request)
    return row in state.pending_forks or any(
        fork.parent_row == row for fork in state.pending_forks.values()
    )


def _count_admission(
    state: SchedulerState, request: Request, num_hit: int, pool: BlockPool
) -> None:
    request.admitted_tokens = num_hit
    request.tokens_when_admitted = request.num_tokens
    counters = state.counters
    if request.first_scheduled_ns is None:
        request.num_cached_tokens = num_hit
        counters.prompt_tokens += request.num_prompt_tokens
        reason = state.prefixes.miss_reason(request, num_hit // state.limits.block_size, pool)
        request.miss_reason = reason
        if state.prefixes.enabled and request.read_cache:
            queries = request.num_tokens
            counters.prefix_queries += queries
            counters.prefix_hits += num_hit
            missed = counters.prefix_misses
            missed[reason] = missed.get(reason, 0) + queries - num_hit
            state.prefixes.hit_rate.observe(queries, num_hit)
    else:
        again = max(0, request.computed_before_preemption - num_hit)
        request.num_recomputed_tokens += again
        counters.recomputed_tokens += again
