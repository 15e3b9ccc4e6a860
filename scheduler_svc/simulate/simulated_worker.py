"""A worker without a model: it follows plans, takes its time by a formula, and counts."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from scheduler_svc.core.step_plan import AdmittedRow, Int32Array, StepPlan, StepResult

END_OF_SEQUENCE = 2**31 - 1


@dataclass(frozen=True, slots=True)
class ModelWish:
    """What the imagined model answers to one prompt."""

    token: int
    """The id it repeats."""

    length: int
    """Tokens of prompt and output, of which the last is the end of sequence."""


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """What a step gave, and what it held meanwhile."""

    result: StepResult
    num_rows: int
    """Rows that run."""

    num_tokens: int
    """Tokens that run."""

    num_context_tokens: int
    """Tokens that the running rows attend to."""

    num_table_blocks: int
    """Entries of all block tables: a block that two rows share counts twice."""

    num_slots_unfilled: int
    """Slots of these blocks that hold no token after the step, counted as often."""


class SimulatedWorker:
    """Rows as a worker knows them, from the plans alone.

    The output of a request is one id repeated and the end of sequence, at the length that the
    workload wants. The core learns of the end as it does from a model: with a step's result.
    """

    def __init__(self, max_rows: int, block_size: int, wishes: Mapping[str, ModelWish]) -> None:
        def column() -> Int32Array:
            return np.zeros(max_rows, dtype=np.int32)

        self._block_size = block_size
        self._wishes = wishes
        self._num_known = column()
        self._num_computed = column()
        self._num_new = column()
        self._num_blocks = column()
        self._length = column()
        self._token = column()

    def run(self, plan: StepPlan) -> SimulatedStep:
        """Apply a plan to the rows, and return what its step gives."""
        self._apply(plan)
        num_new = self._num_new
        reached = self._num_computed + num_new
        runs = num_new > 0
        samples = np.flatnonzero(runs & (reached == self._num_known))
        self._num_known[samples] += 1
        ends = self._num_known[samples] == self._length[samples]
        tokens = np.where(ends, END_OF_SEQUENCE, self._token[samples]).astype(np.int32)
        num_table_blocks = int(self._num_blocks.sum())
        return SimulatedStep(
            result=StepResult(plan.step_id, tokens),
            num_rows=int(np.count_nonzero(runs)),
            num_tokens=int(num_new.sum()),
            num_context_tokens=int(reached[runs].sum()),
            num_table_blocks=num_table_blocks,
            num_slots_unfilled=num_table_blocks * self._block_size - int(reached.sum()),
        )

    def _apply(self, plan: StepPlan) -> None:
        if plan.reset:
            self._forget(np.arange(len(self._num_known), dtype=np.int32))
        if len(plan.released_rows):
            self._forget(plan.released_rows)
        self._num_computed += self._num_new
        np.minimum(self._num_new, 1, out=self._num_new)
        for row in plan.admitted:
            self._admit(row)
        for part in plan.appended:
            np.add.at(self._num_blocks, part.rows, 1)
        self._num_computed[plan.exception_rows] = plan.exception_num_computed_tokens
        self._num_new[plan.exception_rows] = plan.exception_num_new_tokens

    def _forget(self, rows: Int32Array) -> None:
        for column in (self._num_known, self._num_computed, self._num_new, self._num_blocks):
            column[rows] = 0

    def _admit(self, row: AdmittedRow) -> None:
        wish = self._wishes[row.request_id]
        self._num_known[row.row] = len(row.tokens)
        self._num_computed[row.row] = row.num_computed_tokens
        self._num_new[row.row] = row.num_new_tokens
        self._num_blocks[row.row] = len(row.block_tables[0])
        self._length[row.row] = wish.length
        self._token[row.row] = wish.token
