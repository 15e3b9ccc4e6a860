"""What a result changes: tokens appended, requests ended, failed rows undone."""

import numpy as np

from scheduler_svc.core.asked import check_told, keep_prompt_parts, keep_vectors, told_tokens
from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.departure import end, preempt
from scheduler_svc.core.draft_results import DraftTokens, apply_drafts, split_drafts
from scheduler_svc.core.ending import note_stop_id, reason_to_end
from scheduler_svc.core.family_results import FamilyTokens, apply_families, split_result
from scheduler_svc.core.free_block_queue import NULL_BLOCK, BlockId
from scheduler_svc.core.journal import FlyingStep, GivenBack
from scheduler_svc.core.request import FinishReason, Request
from scheduler_svc.core.state import SchedulerState
from scheduler_svc.core.step_plan import IndexArray, Int32Array, StepOutcome, StepResult


def apply_result(state: SchedulerState, result: StepResult, now_ns: int) -> StepOutcome:
    """Append what the oldest step in flight sampled; end what has ended.

    Raises: ValueError if the result is not that step's, or has too few or too many
        tokens: the worker's fault. Nothing is changed then.
    """
    if (pool := state.pool) is None:
        raise ValueError(f"result of step {result.step_id} came before any worker")
    failed = {row for row, _ in result.row_errors}
    families: list[FamilyTokens] = []
    verified: list[DraftTokens] = []
    oldest, whole = state.journal.oldest, result
    if oldest is not None and oldest.step_id == result.step_id:
        whole, verified = split_drafts(oldest, result, failed) if oldest.drafts else (result, [])
        check_told(oldest, whole, failed)
        result, families = split_result(oldest, whole, failed) if oldest.families else (whole, [])
    step = _take_step(state, result, failed)
    state.counters.steps += 1
    outcome = StepOutcome(step.step_id, [], [], [])
    if step.asking is not None or step.prompts:
        outcome.told.update(told_tokens(state, step, whole, failed))
        keep_prompt_parts(state, step, whole)
    for row, reason in result.row_errors:
        _fail_row(state, step, row, reason, pool, now_ns, outcome)
    sampling = step.sampling(failed)
    rows, sampled = step.rows[sampling], result.tokens
    alive = state.rows.generation[rows] == step.generations[sampling]
    if np.count_nonzero(alive) < len(alive):
        for row, token in zip(rows[~alive].tolist(), sampled[~alive].tolist(), strict=True):
            if (request := step.orphans.get(row)) is not None:
                _append_to_waiting(state, request, token, step.step_id, now_ns, outcome)
        rows, sampled = rows[alive], sampled[alive]
    if len(rows):
        _append(state, rows, sampled, step.step_id, pool, now_ns, outcome)
    if families:
        apply_families(state, step, families, pool, now_ns, outcome)
    if verified:
        apply_drafts(state, step, verified, pool, now_ns, outcome)
    if step.pooled:
        keep_vectors(state, step, whole, now_ns, outcome)
    return outcome


def _take_step(state: SchedulerState, result: StepResult, failed: set[int]) -> FlyingStep:
    expected = state.journal.oldest_step_id
    if result.step_id != expected:
        raise ValueError(f"result of step {result.step_id}, expected {expected}")
    step = next(iter(state.journal))
    wanted = int(np.count_nonzero(step.sampling(failed)))
    if len(result.tokens) != wanted:
        raise ValueError(
            f"step {result.step_id} gave {len(result.tokens)} tokens, expected {wanted}"
        )
    if result.num_tokens is not None and (result.num_tokens != 1).any():
        raise ValueError(f"step {result.step_id} gave num_tokens {result.num_tokens}, expected 1s")
    if failed and (strangers := failed - set(step.rows.tolist())):
        raise ValueError(f"step {result.step_id} failed rows {sorted(strangers)}, not in it")
    if result.rows is not None:
        sampling = step.rows[step.sampling(failed)]
        if not np.array_equal(result.rows, sampling):
            raise ValueError(f"step {result.step_id} gave tokens of rows that do not sample")
    return state.journal.pop()


def _append(
    state: SchedulerState,
    order: IndexArray,
    sampled: Int32Array,
    step_id: int,
    pool: BlockPool,
    now_ns: int,
    outcome: StepOutcome,
) -> None:
    """Append one token to each row; end those that stopped or reached their limit."""
    rows = state.rows
    length = rows.append(order, sampled)
    state.counters.generation_tokens += len(order)
    outcome.requests.extend(rows.owners_of(order))
    outcome.tokens.extend(sampled.tolist())
    first = length - rows.num_prompt[order] == 1
    if np.count_nonzero(first):
        for request in rows.owners_of(order[first]):
            request.first_token_ns = now_ns
    stopped = rows.stops(order, sampled)
    ended = stopped | (length >= rows.limit[order])
    state.prefixes.publish_filled(pool)
    if np.count_nonzero(ended):
        for place in np.flatnonzero(ended).tolist():
            request = rows.owner(int(order[place]))
            reason = FinishReason.STOP if stopped[place] else FinishReason.LENGTH
            request.last_step_id = step_id
            note_stop_id(request, int(sampled[place]), reason)
            end(state, request, reason, now_ns)
            outcome.finished.append(request)


def _append_to_waiting(
    state: SchedulerState,
    request: Request,
    token: int,
    step_id: int,
    now_ns: int,
    outcome: StepOutcome,
) -> None:
    """Give a preempted request the token that was in flight when it lost its row."""
    if request.finish_reason is not None:
        return
    request.num_pending_tokens -= 1
    request.tokens.append(token)
    state.waiting.num_tokens += 1
    state.counters.generation_tokens += 1
    request.first_token_ns = request.first_token_ns or now_ns
    outcome.requests.append(request)
    outcome.tokens.append(token)
    reason = reason_to_end(request, token)
    if reason is not None:
        request.last_step_id = step_id
        note_stop_id(request, token, reason)
        end(state, request, reason, now_ns)
        outcome.finished.append(request)


def _fail_row(
    state: SchedulerState,
    step: FlyingStep,
    row: int,
    reason: str,
    pool: BlockPool,
    now_ns: int,
    outcome: StepOutcome,
) -> None:
    """End the request of a row that could not be computed; nobody may hit its blocks."""
    tainted = {block for publisher, block in step.published if publisher == row}
    request = step.orphans.get(row)
    if step.ran_for(row, int(state.rows.generation[row])):
        request = state.rows.owner(row)
        for each in request.family if request.root.beam else (request,):
            tainted.update(_written_by(each, state.limits.block_size, pool))
    tainted.discard(NULL_BLOCK)
    if request is not None and request.root.beam is not None:
        request = request.root
    if request is not None and request.finish_reason is None:
        request.error = reason
        request.last_step_id = step.step_id
        outcome.finished.extend(end(state, request, FinishReason.ERROR, now_ns))
    if tainted:
        in_doubt = _spread_doubt(state, step, tainted, pool)
        for block in tainted:
            pool.retract(block)
        for other in reversed(in_doubt):
            if other.row is not None:
                # What it sampled from these blocks, here and in later steps, is in doubt too.
                preempt(state, other, now_ns, keep_in_flight=False)


def _spread_doubt(
    state: SchedulerState, step: FlyingStep, tainted: set[BlockId], pool: BlockPool
) -> list[Request]:
    """Add the blocks that were computed from tainted ones; return the rows that read them.

    Of a row that has changed hands nobody knows any more what it read. What it named in this
    step, or in one behind it, is added too; what it sampled there is sampled again.
    """
    rows = state.rows
    for flying in (step, *state.journal):
        tainted.update(
            block
            for row, block in flying.published
            if not flying.ran_for(row, int(rows.generation[row]))
        )
        for orphan in flying.orphans.values():
            orphan.num_pending_tokens = 0
        flying.orphans.clear()
    in_doubt: list[Request] = []
    clear = list(rows.running)
    gone = [each for flying in (step, *state.journal) for each in flying.given_back]
    while reading := [each for each in clear if _has_read(each, tainted, gone)]:
        in_doubt += reading
        clear = [each for each in clear if each not in reading]
        for each in reading:
            tainted.update(_written_by(each, state.limits.block_size, pool))
            tainted.update(gift.block for gift in gone if gift.is_own and gift.giver is each)
        tainted.discard(NULL_BLOCK)
    return sorted(in_doubt, key=lambda each: each.precedence)


def _written_by(request: Request, block_size: int, pool: BlockPool) -> list[BlockId]:
    """Return what a request holds behind its hits, null blocks among it."""
    return request.blocks[request.admitted_tokens // block_size * pool.num_groups :]


def _has_read(request: Request, tainted: set[BlockId], gone: list[GivenBack]) -> bool:
    """Whether a request holds a tainted block, or gave one back while it was unconfirmed."""
    return not tainted.isdisjoint(request.blocks) or any(
        gift.giver is request and gift.block in tainted for gift in gone
    )
