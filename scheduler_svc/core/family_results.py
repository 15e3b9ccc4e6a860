"""What a step sampled for families: several tokens of one row, taken out of its result."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from scheduler_svc.core.beams import receive_candidates
from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.forks import fork_running, fork_waiting
from scheduler_svc.core.journal import FlyingStep
from scheduler_svc.core.request import Request
from scheduler_svc.core.state import SchedulerState
from scheduler_svc.core.step_plan import (
    EMPTY,
    Candidates,
    Float32Array,
    Int32Array,
    StepOutcome,
    StepResult,
)


class FamilyTokens(NamedTuple):
    """What one row sampled for its family."""

    row: int

    owner: Request
    """Whose row it was: the root, or a beam."""

    tokens: Int32Array
    """[width] One for each member, in order. Of a beam its likeliest alone."""

    candidates: tuple[Int32Array, Float32Array]
    """Of a beam its likeliest tokens, with log-probabilities."""


def note_families(state: SchedulerState, step: FlyingStep) -> None:
    """Mark the rows of a step that sample for families, so that their tokens are kept apart."""
    for place in np.flatnonzero(step.samples).tolist():
        owner = state.families.get(int(step.rows[place]))
        if owner is not None:
            step.families[int(step.rows[place])] = owner
            step.samples[place] = False


def split_result(
    step: FlyingStep, result: StepResult, failed: set[int]
) -> tuple[StepResult, list[FamilyTokens]]:
    """Return the result without the tokens of families, and these.

    Raises: ValueError if the result has not the rows, or the tokens of a row, that the step asks
        for.
    """
    sampling = step.samples.copy()
    sampling[np.searchsorted(step.rows, list(step.families))] = True
    rows = [row for row in step.rows[sampling].tolist() if row not in failed]
    counts = [step.families[row].num_sequences if row in step.families else 1 for row in rows]
    for name, given, wanted in (
        ("rows", result.rows, rows),
        ("num_tokens", result.num_tokens, counts),
    ):
        if given is not None and given.tolist() != wanted:
            raise ValueError(f"step {step.step_id} gave {name} {given.tolist()}, expected {wanted}")
    if len(result.tokens) != sum(counts):
        raise ValueError(
            f"step {step.step_id} gave {len(result.tokens)} tokens, expected {sum(counts)}"
        )
    candidates = _candidates_by_row(step, rows, result.candidates)
    families, plain = [], []
    ends = np.cumsum(counts).tolist()
    for row, count, end in zip(rows, counts, ends, strict=True):
        tokens = result.tokens[end - count : end]
        if row in step.families:
            families.append(FamilyTokens(row, step.families[row], tokens, candidates[row]))
        else:
            plain.append(int(tokens[0]))
    rest = replace(result, tokens=np.array(plain, dtype=np.int32), rows=None, num_tokens=None)
    return rest, families


def _candidates_by_row(
    step: FlyingStep, rows: list[int], candidates: Candidates | None
) -> dict[int, tuple[Int32Array, Float32Array]]:
    """Return the candidates of each row. Raises: ValueError if a beam has none."""
    none = (EMPTY, np.zeros(0, dtype=np.float32))
    if candidates is None:
        found = dict.fromkeys(rows, none)
    else:
        if len(candidates.counts) != len(rows):
            raise ValueError(
                f"step {step.step_id} gave candidates of {len(candidates.counts)} rows, expected "
                f"{len(rows)}"
            )
        ends = np.cumsum(candidates.counts)[:-1]
        parts = zip(
            np.split(candidates.ids, ends), np.split(candidates.logprobs, ends), strict=True
        )
        found = dict(zip(rows, parts, strict=True))
    for row in rows:
        if row in step.families and step.families[row].root.beam and not len(found[row][0]):
            raise ValueError(f"step {step.step_id} gave no candidates of row {row}, a beam")
    return found


def apply_families(
    state: SchedulerState,
    step: FlyingStep,
    families: list[FamilyTokens],
    pool: BlockPool,
    now_ns: int,
    outcome: StepOutcome,
) -> None:
    """Fork the families that got their first tokens; let beams choose how to go on."""
    for row, owner, tokens, candidates in families:
        if not step.ran_for(row, int(state.rows.generation[row])):
            if step.orphans.get(row) is owner and owner.finish_reason is None:
                fork_waiting(state, owner, tokens, now_ns, outcome)
        elif owner.root.beam:
            receive_candidates(state, owner, candidates, pool, now_ns, outcome)
        else:
            fork_running(state, owner, tokens, pool, now_ns, outcome)
