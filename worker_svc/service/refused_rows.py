"""Rows that ask for what this worker does not serve: they run, and their tokens are dropped.

With plans in flight the scheduler goes on planning such a row until it has read the error. The
row therefore stays in the runtime like any other, until it is released.
"""

from collections.abc import Sequence

import numpy as np

from worker_svc.runtime.step_plan import Candidates, StepPlan, StepResult, TokenLogprobs


class RefusedRows:
    """The refused rows among those the runtime holds."""

    __slots__ = ("_reasons",)

    def __init__(self) -> None:
        self._reasons: dict[int, str] = {}

    def snapshot(self) -> "RefusedRows":
        """Return the refused rows of this moment, for a result that comes later."""
        then = RefusedRows()
        then._reasons = dict(self._reasons)
        return then

    def follow(
        self, plan: StepPlan, refusals: Sequence[tuple[int, str]]
    ) -> Sequence[tuple[int, str]]:
        """Forget and learn rows as the runtime does. Return the plan's refusals.

        A row that continues a refused one is among them.
        """
        if not (self._reasons or refusals):
            return refusals
        if plan.reset:
            self._reasons.clear()
        for row in plan.released_rows.tolist():
            self._reasons.pop(row, None)
        forked = [(fork, self._reasons.get(fork.parent_row)) for fork in plan.forked]
        inherited: list[tuple[int, str]] = []
        for fork, reason in forked:
            self._reasons.pop(fork.row, None)
            if reason is not None:
                self._reasons[fork.row] = reason
                inherited.append((fork.row, reason))
        for admitted in plan.admitted:
            self._reasons.pop(admitted.row, None)
        self._reasons.update(refusals)
        return [*inherited, *refusals]

    def strike(self, result: StepResult, refusals: Sequence[tuple[int, str]]) -> StepResult:
        """Return the result without the refused rows' tokens, and with new refusals as errors."""
        if not (self._reasons or refusals):
            return result
        kept = ~np.isin(result.rows, list(self._reasons))
        failed = dict(result.row_errors) | dict(refusals)
        num_tokens, candidates = result.num_tokens, result.candidates
        kept_tokens = np.repeat(kept, num_tokens) if len(num_tokens) else kept
        if candidates is not None:
            kept_candidates = np.repeat(kept, candidates.counts)
            candidates = Candidates(
                ids=candidates.ids[kept_candidates],
                logprobs=candidates.logprobs[kept_candidates],
                counts=candidates.counts[kept],
            )
        told = result.token_logprobs
        if told is not None:
            told = TokenLogprobs(told.logprobs[kept_tokens], told.ranks[kept_tokens])
        return StepResult(
            step_id=result.step_id,
            rows=result.rows[kept],
            tokens=result.tokens[kept_tokens],
            timing=result.timing,
            row_errors=tuple(sorted(failed.items())),
            num_tokens=num_tokens[kept] if len(num_tokens) else num_tokens,
            candidates=candidates,
            token_logprobs=told,
            prompt_logprobs=tuple(
                part for part in result.prompt_logprobs if part.row not in self._reasons
            ),
            vectors=tuple(part for part in result.vectors if part.row not in self._reasons),
        )
