"""Results that no worker that keeps the protocol gives."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from scheduler_svc.core.step_plan import Int32Array, StepResult


def garbled(result: StepResult, last: StepResult | None) -> Iterator[StepResult]:
    """Yield wrong versions of a result; `last` is the one before it."""
    if last is None or last.step_id != result.step_id:
        yield last or replace(result, step_id=result.step_id - 1)
    yield replace(result, step_id=result.step_id + 1)
    yield replace(result, tokens=np.append(result.tokens, np.int32(0)))
    yield replace(result, row_errors=(*result.row_errors, (1000, "a stranger")))
    if len(result.tokens):
        yield replace(result, tokens=result.tokens[:-1])
    if result.candidates is not None:
        yield replace(result, candidates=None)
    if result.rows is None or not len(result.rows):
        return
    yield replace(result, rows=result.rows + 1)
    yield replace(result, row_errors=(*result.row_errors, (int(result.rows[0]), "and sampled")))
    if result.num_tokens is not None and len(result.rows) > 1:
        yield replace(result, num_tokens=_moved(result.num_tokens))


def _moved(counts: Int32Array) -> Int32Array:
    """Return counts of the same sum, with a token of another row."""
    moved = counts.copy()
    moved[0] += 1
    moved[-1] -= 1
    return moved
