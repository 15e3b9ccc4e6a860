"""A worker without a model: it follows plans, takes its time by a formula, and counts."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.step_plan import (
    EMPTY,
    AdmittedRow,
    Candidates,
    ForkedRow,
    IndexArray,
    Int32Array,
    StepPlan,
    StepResult,
)
from scheduler_svc.simulate.beam_forks import Parents, candidates, parents_at

END_OF_SEQUENCE = 2**31 - 1


@dataclass(frozen=True, slots=True)
class ModelWish:
    """What the imagined model answers to one prompt."""

    token: int
    """The id that its first sequence repeats; the second one repeats the next id, and so on."""

    lengths: tuple[int, ...]
    """Tokens of prompt and output of each sequence; the last one is the end of sequence."""

    num_prompt_tokens: int
    """Tokens of the prompt."""

    beams: Parents | None = None
    """[steps, width] The beam search to repeat, if it is one; it ends by the core's bound."""


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
    """Slots of these blocks that hold no token after the step; of a shared block counted once."""


class SimulatedWorker:
    """Rows as a worker knows them, from the plans alone.

    The output of a sequence is one id repeated and the end of sequence, at the length that the
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
        self._last_block = column()
        self._num_samples = column()
        self._beam = column()
        self._length = column()
        self._token = column()
        self._requests = [""] * max_rows
        self._has_beams = any(wish.beams is not None for wish in wishes.values())

    def run(self, plan: StepPlan) -> SimulatedStep:
        """Apply a plan to the rows, and return what its step gives."""
        self._apply(plan)
        num_new = self._num_new
        reached = self._num_computed + num_new
        runs = num_new > 0
        result = self._sample(plan.step_id, np.flatnonzero(runs & (reached == self._num_known)))
        # Full blocks have no unfilled slots, so only a last block can count more than once.
        _, owners = np.unique(self._last_block, return_index=True)
        unfilled = self._num_blocks[owners] * self._block_size - reached[owners]
        return SimulatedStep(
            result=result,
            num_rows=int(np.count_nonzero(runs)),
            num_tokens=int(num_new.sum()),
            num_context_tokens=int(reached[runs].sum()),
            num_table_blocks=int(self._num_blocks.sum()),
            num_slots_unfilled=int(unfilled.sum()),
        )

    def _sample(self, step_id: int, rows: IndexArray) -> StepResult:
        """Draw a token for each row, or several for one whose sequences are not forked yet."""
        if self._has_beams:
            return self._offer(step_id, rows)
        counts = self._num_samples[rows]
        self._num_known[rows] += 1
        self._num_samples[rows] = 1
        ends = self._num_known[rows] == self._length[rows]
        tokens = np.where(ends, END_OF_SEQUENCE, self._token[rows]).astype(np.int32)
        places = np.flatnonzero(counts > 1)
        if not len(places):
            return StepResult(step_id, tokens)
        parts = np.split(tokens, np.arange(1, len(tokens)))
        for place in places.tolist():
            parts[place] = self._first_tokens(int(rows[place]))
        return StepResult(step_id, np.concatenate(parts), num_tokens=counts)

    def _offer(self, step_id: int, rows: IndexArray) -> StepResult:
        """Give each beam's candidates; a row takes the first of them until the core has chosen."""
        ids, logprobs = [], []
        for row in rows.tolist():
            wish = self._wishes[self._requests[row]]
            if wish.beams is None:
                raise InvariantError(f"request {self._requests[row]} is none of the beam searches")
            num_generated = int(self._num_known[row]) - wish.num_prompt_tokens
            parents = parents_at(wish.beams, num_generated)
            tokens, likely = candidates(parents, int(self._beam[row]), wish.token)
            ids.append(tokens)
            logprobs.append(likely)
            self._beam[row] = tokens[0] - wish.token
        self._num_known[rows] += 1
        if not ids:
            return StepResult(step_id, EMPTY)
        counts = np.array([len(each) for each in ids], dtype=np.int32)
        offered = Candidates(np.concatenate(ids), np.concatenate(logprobs), counts)
        firsts = np.array([each[0] for each in ids], dtype=np.int32)
        return StepResult(step_id, firsts, candidates=offered)

    def _first_tokens(self, row: int) -> Int32Array:
        wish, length = self._wishes[self._requests[row]], int(self._num_known[row])
        tokens = wish.token + np.arange(len(wish.lengths), dtype=np.int32)
        return np.where(np.array(wish.lengths) == length, END_OF_SEQUENCE, tokens).astype(np.int32)

    def _apply(self, plan: StepPlan) -> None:
        if plan.reset:
            self._forget(np.arange(len(self._num_known), dtype=np.int32))
        if len(plan.released_rows):
            self._forget(plan.released_rows)
        if plan.forked:
            self._fork(plan.forked)
        self._num_computed += self._num_new
        np.minimum(self._num_new, 1, out=self._num_new)
        for row in plan.admitted:
            self._admit(row)
        for part in plan.appended:
            np.add.at(self._num_blocks, part.rows, 1)
            # Of several blocks of one row the last one stays.
            self._last_block[part.rows] = part.blocks
        self._num_computed[plan.exception_rows] = plan.exception_num_computed_tokens
        self._num_new[plan.exception_rows] = plan.exception_num_new_tokens

    def _forget(self, rows: Int32Array) -> None:
        for column in self._progress:
            column[rows] = 0

    @property
    def _progress(self) -> tuple[Int32Array, ...]:
        """What a fork takes over; all 0 in a row that is not used."""
        return (
            self._num_known,
            self._num_computed,
            self._num_new,
            self._num_blocks,
            self._last_block,
            self._num_samples,
            self._beam,
        )

    def _fork(self, forked: tuple[ForkedRow, ...]) -> None:
        rows = [each.row for each in forked]
        parents = [each.parent_row for each in forked]
        for column in self._progress:
            column[rows] = column[parents]
        requests = [self._requests[parent] for parent in parents]
        for fork, request in zip(forked, requests, strict=True):
            self._num_blocks[fork.row] = fork.num_blocks
            self._name(fork.row, request, fork.sequence_index)
            if fork.last_token is not None:
                self._beam[fork.row] = fork.last_token - self._wishes[request].token

    def _name(self, row: int, request_id: str, sequence_index: int) -> None:
        wish = self._wishes[request_id]
        self._requests[row] = request_id
        if wish.beams is not None:
            return
        self._length[row] = wish.lengths[sequence_index]
        self._token[row] = wish.token + sequence_index

    def _admit(self, row: AdmittedRow) -> None:
        self._num_known[row.row] = len(row.tokens)
        self._num_computed[row.row] = row.num_computed_tokens
        self._num_new[row.row] = row.num_new_tokens
        self._num_blocks[row.row] = len(row.block_tables[0])
        self._last_block[row.row] = row.block_tables[0][-1]
        self._num_samples[row.row] = row.num_samples
        self._name(row.row, row.request_id, row.sequence_index)
        has_output = len(row.tokens) > row.num_prompt_tokens
        first_token = self._wishes[row.request_id].token
        self._beam[row.row] = row.tokens[-1] - first_token if has_output else 0
