"""Plays the scheduler for a model runner: it writes step plans as deltas, and decides nothing.

Tests say which sequence runs how many tokens in which step; rows and blocks are drawn at random.
"""

import random
from collections import abc
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from worker_svc.runtime.device_runner import DeviceRunner
from worker_svc.runtime.model_runner import ModelRunner
from worker_svc.runtime.step_plan import (
    AdmittedRow,
    AppendedBlocks,
    BlockCopies,
    EmbeddedSpan,
    ForkedRow,
    Int32Array,
    SamplingParams,
    StepPlan,
    StepResult,
    no_int32,
)

AnyRunner: TypeAlias = ModelRunner | DeviceRunner


def int32(*values: int) -> Int32Array:
    return np.array(values, dtype=np.int32)


def make_plan(
    step_id: int,
    *,
    reset: bool = False,
    released: list[int] | None = None,
    forked: list[ForkedRow] | None = None,
    admitted: list[AdmittedRow] | None = None,
    appended: list[tuple[int, int]] | None = None,
    copies: list[tuple[int, int]] | None = None,
    exceptions: list[tuple[int, int, int]] | None = None,
) -> StepPlan:
    """Return a plan; `exceptions` are (row, num_computed_tokens, num_new_tokens)."""
    rows, blocks = _columns(appended or [], 2)
    except_rows, computed, new = _columns(exceptions or [], 3)
    return StepPlan(
        step_id=step_id,
        reset=reset,
        released_rows=int32(*(released or [])),
        forked=tuple(forked or []),
        admitted=tuple(admitted or []),
        appended=(AppendedBlocks(rows, blocks),) if len(rows) else (),
        copies=BlockCopies(*_columns(copies or [], 2)),
        exception_rows=except_rows,
        exception_num_computed_tokens=computed,
        exception_num_new_tokens=new,
    )


def _columns(entries: abc.Sequence[tuple[int, ...]], width: int) -> list[Int32Array]:
    if not entries:
        return [no_int32() for _ in range(width)]
    return [int32(*column) for column in zip(*entries, strict=True)]


@dataclass(eq=False)
class Sequence:
    """What a scheduler knows of one sequence, and where it is."""

    prompt: list[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    sequence_index: int = 0
    adapter: int = 0
    embeddings: tuple[EmbeddedSpan, ...] = ()
    output: list[int] = field(default_factory=list)
    row: int | None = None
    blocks: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    last_new: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)


class PlanDriver:
    """Runs steps on a runner, and hands out its rows and blocks in an order drawn from a seed."""

    def __init__(self, runner: AnyRunner, seed: int = 0) -> None:
        cache = runner.kv_cache
        self._runner = runner
        self._block_size = cache.block_size
        self._free_blocks = list(range(1, cache.num_blocks + 1))
        self._free_rows = list(range(len(runner.rows.num_tokens)))
        random.Random(seed).shuffle(self._free_blocks)
        random.Random(seed).shuffle(self._free_rows)
        self._running: list[Sequence] = []
        self._released: list[int] = []
        self._step_id = 0

    def step(self, work: abc.Mapping[Sequence, int]) -> StepResult:
        """Run so many tokens of each sequence; those that run and are left out stay, and wait."""
        admitted, appended, exceptions = [], [], []
        for sequence, new in work.items():
            end = sequence.num_computed_tokens + new
            assert end <= sequence.num_tokens
            missing = -(-end // self._block_size) - len(sequence.blocks)
            granted = [self._free_blocks.pop() for _ in range(missing)]
            sequence.blocks += granted
            if sequence.row is None:
                sequence.row = self._free_rows.pop()
                self._running.append(sequence)
                admitted.append(self._admission(sequence, new))
            else:
                appended += [(sequence.row, block) for block in granted]
                if new != 1 or not sequence.last_new:
                    exceptions.append((sequence.row, sequence.num_computed_tokens, new))
        for sequence in self._running:
            if sequence not in work and sequence.last_new and sequence.row is not None:
                exceptions.append((sequence.row, sequence.num_computed_tokens, 0))
            sequence.last_new = work.get(sequence, 0)
        plan = make_plan(
            self._step_id,
            released=self._released,
            admitted=admitted,
            appended=appended,
            exceptions=exceptions,
        )
        self._released = []
        self._step_id += 1
        return self._apply(self._runner.run(plan))

    def release(self, sequence: Sequence) -> None:
        """Take row and blocks from a sequence, as when it ends or is preempted."""
        assert sequence.row is not None
        self._running.remove(sequence)
        self._released.append(sequence.row)
        self._free_rows.insert(0, sequence.row)
        self._free_blocks[:0] = sequence.blocks
        sequence.row, sequence.blocks = None, []
        sequence.num_computed_tokens = sequence.last_new = 0

    def generate(self, sequence: Sequence, count: int, chunk: int | None = None) -> list[int]:
        """Run one sequence alone to its end, and return its output."""
        while len(sequence.output) < count:
            missing = sequence.num_tokens - sequence.num_computed_tokens
            self.step({sequence: min(missing, chunk or missing)})
        self.release(sequence)
        return sequence.output

    def _apply(self, result: StepResult) -> StepResult:
        by_row = {sequence.row: sequence for sequence in self._running}
        expected = []
        for sequence in self._running:
            assert sequence.row is not None
            sequence.num_computed_tokens += sequence.last_new
            if sequence.last_new and sequence.num_computed_tokens == sequence.num_tokens:
                expected.append(sequence.row)
        answered = [*result.rows.tolist(), *(row for row, _ in result.row_errors)]
        assert sorted(expected) == sorted(answered)
        for row, token in zip(result.rows.tolist(), result.tokens.tolist(), strict=True):
            by_row[row].output.append(token)
        return result

    def _admission(self, sequence: Sequence, new: int) -> AdmittedRow:
        assert sequence.row is not None
        return AdmittedRow(
            row=sequence.row,
            request_id=f"request-{sequence.row}",
            tokens=int32(*sequence.prompt, *sequence.output),
            num_prompt_tokens=len(sequence.prompt),
            num_computed_tokens=sequence.num_computed_tokens,
            num_new_tokens=new,
            block_tables=(int32(*sequence.blocks),),
            sampling=sequence.sampling,
            sequence_index=sequence.sequence_index,
            adapter=sequence.adapter,
            embeddings=sequence.embeddings,
        )
