"""What steps tell beside tokens: noted when a step is planned, checked and kept when it answers."""

from itertools import repeat

import numpy as np

from scheduler_svc.core.departure import end
from scheduler_svc.core.journal import FlyingStep
from scheduler_svc.core.reports import Asks
from scheduler_svc.core.request import FinishReason, Request
from scheduler_svc.core.state import SchedulerState
from scheduler_svc.core.step_plan import StepOutcome, StepResult
from scheduler_svc.core.told import PromptTable, TokenTold


def note_asked(state: SchedulerState, step: FlyingStep) -> None:
    """Note what a step must tell, before its families are noted. Rows have advanced."""
    rows = state.rows
    asks = rows.asks[step.rows]
    asking = step.samples & ((asks & Asks.LOGPROBS) != 0)
    if np.count_nonzero(asking):
        step.asking = asking
    for place in np.flatnonzero(asks & Asks.PROMPT).tolist():
        row = int(step.rows[place])
        begin = int(rows.num_computed[row] - rows.num_last_new[row])
        last = min(int(rows.num_computed[row]), int(rows.num_prompt[row]) - 1)
        if last > begin:
            step.prompts[row] = range(begin + 1, last + 1)
    for place in np.flatnonzero(step.samples & ((asks & Asks.VECTOR) != 0)).tolist():
        row = int(step.rows[place])
        step.pooled[row] = rows.owner(row)
        step.samples[place] = False


def check_told(step: FlyingStep, result: StepResult, failed: set[int]) -> None:
    """Check that a result tells what its step was asked for, but of rows that failed.

    Raises: ValueError if not: the worker's fault.
    """
    _check_prompts(step, result, failed)
    wanted = {row for row in step.pooled if row not in failed}
    given = [row for row, _ in result.vectors]
    if len(given) != len(wanted) or {*given} != wanted:
        raise ValueError(
            f"step {step.step_id} gave vectors of rows {given}, expected {sorted(wanted)}"
        )
    sampled = _sampled(step, failed)
    if not any(asks for _, asks, _ in sampled):
        return
    ranks, counts = result.ranks, [count for _, _, count in sampled]
    if ranks is None or result.logprobs is None:
        raise ValueError(f"step {step.step_id} gave no log-probabilities, which rows asked for")
    if sum(counts) != len(ranks):
        raise ValueError(f"step {step.step_id} gave {len(ranks)} ranks, expected {sum(counts)}")
    asking = np.repeat([asks for _, asks, _ in sampled], counts)
    if (ranks[asking] < 1).any():
        raise ValueError(f"step {step.step_id} gave no rank of a token whose row asked for it")
    candidates = result.candidates
    if candidates is not None and len(candidates.counts) != len(counts):
        raise ValueError(
            f"step {step.step_id} gave candidates of {len(candidates.counts)} rows, expected "
            f"{len(counts)}"
        )


def _check_prompts(step: FlyingStep, result: StepResult, failed: set[int]) -> None:
    wanted = {row: told for row, told in step.prompts.items() if row not in failed}
    given = {
        part.row: range(part.offset, part.offset + len(part.logprobs))
        for part in result.prompt_parts
    }
    if given != wanted or len(given) != len(result.prompt_parts):
        raise ValueError(f"step {step.step_id} told of prompt positions {given}, expected {wanted}")


def _sampled(step: FlyingStep, failed: set[int]) -> list[tuple[int, bool, int]]:
    """Return the rows that sample, whether each asks, and how many tokens it has; in order."""
    if step.asking is None:
        return []
    sampled = []
    for row, samples, asks in zip(
        step.rows.tolist(), step.samples.tolist(), step.asking.tolist(), strict=True
    ):
        root = step.families.get(row)
        if (samples or root is not None) and row not in failed:
            sampled.append((row, asks, 1 if root is None else root.num_sequences))
    return sampled


def told_tokens(
    state: SchedulerState, step: FlyingStep, result: StepResult, failed: set[int]
) -> dict[Request, TokenTold]:
    """Return what a checked result tells of each request's token, before any is appended."""
    told: dict[Request, TokenTold] = {}
    if step.asking is None or result.logprobs is None or result.ranks is None:
        return told
    logprobs, ranks = result.logprobs.tolist(), result.ranks.tolist()
    found = result.candidates
    counts = repeat(0) if found is None else found.counts.tolist()
    place = begin = 0
    for (row, asks, num_tokens), count in zip(_sampled(step, failed), counts, strict=False):
        owner = _owner(state, step, row)
        if asks and owner is not None:
            ids: tuple[int, ...] = ()
            best: tuple[float, ...] = ()
            if found is not None:
                ids = tuple(found.ids[begin : begin + count].tolist())
                best = tuple(found.logprobs[begin : begin + count].tolist())
            members = owner.family if row in step.families else (owner,)
            for nth, member in enumerate(members):
                told[member] = TokenTold(logprobs[place + nth], ranks[place + nth], ids, best)
        place += num_tokens
        begin += count
    return told


def _owner(state: SchedulerState, step: FlyingStep, row: int) -> Request | None:
    """Return whom a row of a step works for: who still has it, or who lost it and waits."""
    if step.ran_for(row, int(state.rows.generation[row])):
        return state.rows.owner(row)
    return step.orphans.get(row)


def keep_prompt_parts(state: SchedulerState, step: FlyingStep, result: StepResult) -> None:
    """Add what a checked result tells of prompts to what their requests know."""
    for part in result.prompt_parts:
        request = _owner(state, step, part.row)
        if request is None or request.finish_reason is not None:
            continue
        if request.prompt_table is None:
            request.prompt_table = PromptTable(
                request.num_prompt_tokens, part.candidate_ids.shape[1]
            )
        request.prompt_table.add(part)


def keep_vectors(
    state: SchedulerState, step: FlyingStep, result: StepResult, now_ns: int, outcome: StepOutcome
) -> None:
    """End the requests whose vectors a checked result brings."""
    for row, vector in result.vectors:
        request = _owner(state, step, row)
        if request is not step.pooled[row] or request.finish_reason is not None:
            continue
        request.num_pending_tokens = 0
        request.vector = vector
        request.last_step_id = step.step_id
        end(state, request, FinishReason.STOP, now_ns)
        outcome.finished.append(request)
