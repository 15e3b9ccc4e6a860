"""Rows that ask for what this worker does not serve: they run, and their tokens are dropped.

With plans in flight the scheduler goes on planning such a row until it has read the error. The
row therefore stays in the runtime like any other, until it is released.
"""

from collections.abc import Sequence

import numpy as np

from worker_svc.runtime.step_plan import StepPlan, StepResult


class RefusedRows:
    """The refused rows among those the runtime holds."""

    __slots__ = ("_rows",)

    def __init__(self) -> None:
        self._rows: set[int] = set()

    def follow(self, plan: StepPlan, refusals: Sequence[tuple[int, str]]) -> None:
        """Forget and learn rows as the runtime does."""
        if not (self._rows or refusals):
            return
        if plan.reset:
            self._rows.clear()
        self._rows.difference_update(plan.released_rows.tolist())
        self._rows.difference_update(admitted.row for admitted in plan.admitted)
        self._rows.update(row for row, _ in refusals)

    def strike(self, result: StepResult, refusals: Sequence[tuple[int, str]]) -> StepResult:
        """Return the result without the refused rows' tokens, and with new refusals as errors."""
        if not self._rows:
            return result
        kept = ~np.isin(result.rows, list(self._rows))
        failed = dict(result.row_errors) | dict(refusals)
        return StepResult(
            step_id=result.step_id,
            rows=result.rows[kept],
            tokens=result.tokens[kept],
            timing=result.timing,
            row_errors=tuple(sorted(failed.items())),
        )
