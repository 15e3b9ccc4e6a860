"""What a step sampled for families: several tokens of one row, taken out of its result."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.forks import fork_running, fork_waiting
from scheduler_svc.core.journal import FlyingStep
from scheduler_svc.core.request import Request
from scheduler_svc.core.state import SchedulerState
from scheduler_svc.core.step_plan import Int32Array, StepOutcome, StepResult


class FamilyTokens(NamedTuple):
    """What one row sampled for its family."""

    row: int
    root: Request

    tokens: Int32Array
    """[width] One for each member, in order."""


def note_families(state: SchedulerState, step: FlyingStep) -> None:
    """Mark the rows of a step that sample for families, so that their tokens are kept apart."""
    for place in np.flatnonzero(step.samples).tolist():
        root = state.families.get(int(step.rows[place]))
        if root is not None:
            step.families[int(step.rows[place])] = root
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
    counts = [step.families[row].width if row in step.families else 1 for row in rows]
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
    families, plain, start = [], [], 0
    for row, count in zip(rows, counts, strict=True):
        tokens = result.tokens[start : start + count]
        start += count
        if row in step.families:
            families.append(FamilyTokens(row, step.families[row], tokens))
        else:
            plain.append(int(tokens[0]))
    rest = replace(result, tokens=np.array(plain, dtype=np.int32), rows=None, num_tokens=None)
    return rest, families


def apply_families(
    state: SchedulerState,
    step: FlyingStep,
    families: list[FamilyTokens],
    pool: BlockPool,
    now_ns: int,
    outcome: StepOutcome,
) -> None:
    """Fork the families that got their first tokens."""
    # Once forked, each member would name the blocks that they share.
    state.prefixes.publish_filled(pool)
    for row, root, tokens in families:
        if step.ran_for(row, int(state.rows.generation[row])):
            fork_running(state, root, tokens, pool, now_ns, outcome)
        elif step.orphans.get(row) is root and root.finish_reason is None:
            fork_waiting(state, root, tokens, now_ns, outcome)
