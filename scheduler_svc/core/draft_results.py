"""What a step verified of drafts: several tokens of one row, taken out of its result."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.departure import end
from scheduler_svc.core.draft_record import DraftRecord
from scheduler_svc.core.ending import note_stop_id
from scheduler_svc.core.journal import FlyingStep
from scheduler_svc.core.request import FinishReason
from scheduler_svc.core.state import SchedulerState
from scheduler_svc.core.step_plan import Candidates, Int32Array, StepOutcome, StepResult


class DraftTokens(NamedTuple):
    """What one row with a draft sampled."""

    row: int

    tokens: Int32Array
    """[1 + accepted] The drafted tokens that were accepted, and the one behind them."""

    num_drafted: int


def split_drafts(
    step: FlyingStep, result: StepResult, failed: set[int]
) -> tuple[StepResult, list[DraftTokens]]:
    """Return the result without the tokens of rows with drafts, and these.

    Raises: ValueError if the result has not the rows that sample, or a row has more tokens than
        its draft and one, or others than were drafted before its last.
    """
    sampling = step.samples.copy()
    sampling[np.searchsorted(step.rows, [*step.families, *step.drafts])] = True
    rows = np.array([row for row in step.rows[sampling].tolist() if row not in failed], np.int32)
    if result.rows is not None and not np.array_equal(result.rows, rows):
        raise ValueError(
            f"step {step.step_id} gave rows {result.rows.tolist()}, expected {rows.tolist()}"
        )
    counts = np.ones(len(rows), np.int32) if result.num_tokens is None else result.num_tokens
    if len(counts) != len(rows) or int(counts.sum()) != len(result.tokens):
        raise ValueError(
            f"step {step.step_id} gave {len(result.tokens)} tokens, expected "
            f"{int(counts.sum())} of {len(rows)} rows"
        )
    verified: list[DraftTokens] = []
    ends = np.cumsum(counts)
    drafted = np.array([row in step.drafts for row in rows.tolist()], dtype=np.bool_)
    for place in np.flatnonzero(drafted).tolist():
        row, end_of_row = int(rows[place]), int(ends[place])
        tokens = result.tokens[end_of_row - int(counts[place]) : end_of_row]
        draft = step.drafts[row]
        if not 1 <= len(tokens) <= 1 + len(draft):
            raise ValueError(
                f"step {step.step_id} gave {len(tokens)} tokens of row {row}, expected 1 to "
                f"{1 + len(draft)}"
            )
        if not np.array_equal(tokens[:-1], draft[: len(tokens) - 1]):
            raise ValueError(f"step {step.step_id} accepted tokens that row {row} did not draft")
        verified.append(DraftTokens(row, tokens, len(draft)))
    kept = ~drafted.repeat(counts)
    rest = replace(
        result,
        tokens=result.tokens[kept],
        logprobs=None if result.logprobs is None else result.logprobs[kept],
        ranks=None if result.ranks is None else result.ranks[kept],
        rows=rows[~drafted],
        num_tokens=None if result.num_tokens is None else counts[~drafted],
        candidates=_without(result.candidates, drafted),
    )
    return rest, verified


def _without(
    candidates: Candidates | None, drafted: np.ndarray[tuple[int], np.dtype[np.bool_]]
) -> Candidates | None:
    """Return the candidates but for rows with drafts, which have none."""
    if candidates is None or len(candidates.counts) != len(drafted):
        return candidates
    return replace(candidates, counts=candidates.counts[~drafted])


def apply_drafts(
    state: SchedulerState,
    step: FlyingStep,
    verified: list[DraftTokens],
    pool: BlockPool,
    now_ns: int,
    outcome: StepOutcome,
) -> None:
    """Append what was accepted; what lies in the cache behind it will be written anew.

    What a row sampled that has since lost its request, or been preempted, is sampled again.
    """
    for row, tokens, num_drafted in verified:
        if step.ran_for(row, int(state.rows.generation[row])):
            _append_verified(state, step.step_id, row, tokens, num_drafted, pool, now_ns, outcome)


def _append_verified(
    state: SchedulerState,
    step_id: int,
    row: int,
    tokens: Int32Array,
    num_drafted: int,
    pool: BlockPool,
    now_ns: int,
    outcome: StepOutcome,
) -> None:
    rows, request = state.rows, state.rows.owner(row)
    reason = _append_until_end(state, row, tokens, outcome)
    rows.num_pending[row] = 0
    rows.num_computed[row] = rows.num_tokens[row] - 1
    request.first_token_ns = request.first_token_ns or now_ns
    num_accepted = len(tokens) - 1
    state.counters.draft_tokens += num_drafted
    state.counters.accepted_draft_tokens += num_accepted
    request.drafts = request.drafts or DraftRecord()
    request.drafts.note(num_drafted, num_accepted, int(rows.num_tokens[row]))
    state.prefixes.publish_filled(pool)
    if reason is not None:
        request.last_step_id = step_id
        note_stop_id(request, outcome.tokens[-1], reason)
        end(state, request, reason, now_ns)
        outcome.finished.append(request)


def _append_until_end(
    state: SchedulerState, row: int, tokens: Int32Array, outcome: StepOutcome
) -> FinishReason | None:
    """Append tokens one by one, none behind the one that ends the request; return why that ends."""
    rows, request = state.rows, state.rows.owner(row)
    place = np.array([row], dtype=np.intp)
    rows.num_pending[row] = len(tokens)
    for number in range(len(tokens)):
        token = tokens[number : number + 1]
        length = int(rows.append(place, token)[0])
        outcome.requests.append(request)
        outcome.tokens.append(int(token[0]))
        state.counters.generation_tokens += 1
        if bool(rows.stops(place, token)[0]):
            return FinishReason.STOP
        if length >= rows.limit[row]:
            return FinishReason.LENGTH
    return None
