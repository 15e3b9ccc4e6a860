"""The bare forward loop: the same runner without scheduler and gRPC, as fast as it can go.

An engine's own cost is measured against it. Runs are asked for on standard input, one JSON
object a line, and answered with one JSON line each; the first line says that the model is there.
"""

import json
import time
from typing import Final, TextIO

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from worker_svc.errors import ConfigError
from worker_svc.runtime.memory_budget import MemoryReport, blocks_for
from worker_svc.runtime.step_plan import (
    AdmittedRow,
    BlockCopies,
    Int32Array,
    SamplingParams,
    StepPlan,
    no_int32,
)
from worker_svc.service.model_host import CacheLimits, ModelHost, StepRunner

MAX_NUM_SEQS: Final = 256
"""Rows of the runner, unless a run asks for more: what a scheduler has by default."""

MAX_NUM_BATCHED_TOKENS: Final = 2048
"""Tokens of its largest step, likewise."""


class BenchRun(BaseModel):
    """One run: every prompt to its full length, greedily, all there from the start."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_seqs: int = Field(ge=1, le=65536)
    """Sequences."""

    input_len: int = Field(ge=1)
    """Tokens of each prompt."""

    output_len: int = Field(ge=1)
    """Tokens to generate for each."""

    block_size: int = Field(default=16, ge=1)
    """Tokens per block."""

    max_num_batched_tokens: int = Field(default=MAX_NUM_BATCHED_TOKENS, ge=1)
    """Most tokens in a step."""

    prompts: list[list[int]] | None = None
    """Token ids, one list per sequence. Unset: ids that count up."""

    @property
    def max_model_len(self) -> int:
        """Tokens of a finished sequence."""
        return self.input_len + self.output_len


def bench_forward(host: ModelHost, requests: TextIO, answers: TextIO) -> None:
    """Answer runs until the requests end.

    Raises: ConfigError if one is impossible.
    """
    bench = _Bench(host)
    _write(answers, {"ready": True})
    for line in requests:
        if line.strip():
            _write(answers, bench.answer(_read_run(line)))


def plan_run(run: BenchRun, num_groups: int = 1) -> list[StepPlan]:
    """Return all plans of a run on so many KV groups, as a scheduler would make them in turn.

    Lengths are known beforehand, since nothing ends a sequence early: rows that run go on
    first, then rows are admitted, both within the budget of tokens.
    """
    prompts = _prompt_columns(run)
    num_computed, num_known = [0] * run.num_seqs, [run.input_len] * run.num_seqs
    before: dict[int, int] = {}  # the rows of the previous plan, and the tokens they ran there
    num_admitted = 0
    finished: list[int] = []
    plans: list[StepPlan] = []
    while num_admitted < run.num_seqs or before:
        budget = run.max_num_batched_tokens
        now: dict[int, int] = {}
        exceptions: list[tuple[int, int, int]] = []
        for row, num_before in before.items():
            now[row] = min(num_known[row] - num_computed[row], budget)
            budget -= now[row]
            # By the rule a row that ran runs one token more, and one that waited waits.
            if now[row] != min(num_before, 1):
                exceptions.append((row, num_computed[row], now[row]))
        admitted: list[AdmittedRow] = []
        while budget and num_admitted < run.num_seqs:
            row, num_admitted = num_admitted, num_admitted + 1
            now[row] = min(run.input_len, budget)
            budget -= now[row]
            admitted.append(_admit(run, row, prompts[row], now[row], num_groups))
        plans.append(_plan(len(plans), finished, admitted, exceptions))
        for row, count in now.items():
            num_computed[row] += count
            num_known[row] += num_computed[row] == num_known[row]
        finished = [row for row in now if num_known[row] == run.max_model_len]
        before = {row: count for row, count in now.items() if num_known[row] < run.max_model_len}
    return plans


class _Bench:
    """A runner, made anew where a run asks for more than it has."""

    def __init__(self, host: ModelHost) -> None:
        host.load()
        self._host = host
        self._num_groups = len(host.model.kv_groups)
        self._limits = CacheLimits(
            block_size=16,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            max_model_len=host.model.max_position_embeddings,
            num_blocks_override=0,
        )
        self._runner: StepRunner
        self._report: MemoryReport
        self._runner, self._report = host.make_runner(self._limits)

    def answer(self, run: BenchRun) -> dict[str, object]:
        """Time one run."""
        self._make_room(run)
        plans = plan_run(run, self._num_groups)
        step = self._runner.run
        started = time.perf_counter()
        for plan in plans:
            step(plan)
        wall_s = time.perf_counter() - started
        return {
            "output_tok_s": run.num_seqs * run.output_len / wall_s,
            "wall_s": wall_s,
            "steps": len(plans),
            "mean_step_ms": 1000 * wall_s / len(plans),
        }

    def _make_room(self, run: BenchRun) -> None:
        """Bring the runner to the run's limits.

        Raises: ConfigError if the model or the memory has no room for the run.
        """
        limits = CacheLimits(
            block_size=run.block_size,
            max_num_seqs=max(run.num_seqs, self._limits.max_num_seqs),
            max_num_batched_tokens=max(
                run.max_num_batched_tokens, self._limits.max_num_batched_tokens
            ),
            max_model_len=self._limits.max_model_len,
            num_blocks_override=0,
        )
        if limits != self._limits:
            del self._runner
            self._runner, self._report = self._host.make_runner(limits)
            self._limits = limits
        if run.max_model_len > limits.max_model_len:
            raise ConfigError(
                f"input_len + output_len is {run.max_model_len}, must be at most "
                f"{limits.max_model_len}, for which the model was made"
            )
        num_blocks = self._num_groups * run.num_seqs
        num_blocks *= blocks_for(run.max_model_len, run.block_size)
        if num_blocks > self._report.num_blocks:
            raise ConfigError(
                f"num_seqs is {run.num_seqs}, whose {num_blocks} blocks must be at most "
                f"{self._report.num_blocks}"
            )


def _prompt_columns(run: BenchRun) -> list[Int32Array]:
    if run.prompts is None:
        return [np.arange(run.input_len, dtype=np.int32) % 256] * run.num_seqs
    if len(run.prompts) != run.num_seqs or {len(ids) for ids in run.prompts} != {run.input_len}:
        raise ConfigError(
            f"prompts must be num_seqs ({run.num_seqs}) lists of input_len ({run.input_len}) ids"
        )
    return [np.array(ids, dtype=np.int32) for ids in run.prompts]


def _admit(
    run: BenchRun, row: int, prompt: Int32Array, num_new_tokens: int, num_groups: int
) -> AdmittedRow:
    """Admit a row with all the blocks it will ever need. Block 0 is the null block."""
    width = blocks_for(run.max_model_len, run.block_size)
    first = 1 + row * num_groups * width
    blocks = np.arange(first, first + num_groups * width, dtype=np.int32)
    return AdmittedRow(
        row=row,
        request_id=f"bench-{row}",
        tokens=prompt,
        num_prompt_tokens=run.input_len,
        num_computed_tokens=0,
        num_new_tokens=num_new_tokens,
        block_tables=tuple(blocks.reshape(num_groups, width)),
        sampling=SamplingParams(),
    )


def _plan(
    step_id: int,
    released: list[int],
    admitted: list[AdmittedRow],
    exceptions: list[tuple[int, int, int]],
) -> StepPlan:
    columns = np.array(exceptions, dtype=np.int32).reshape(-1, 3)
    return StepPlan(
        step_id=step_id,
        reset=step_id == 0,
        released_rows=np.array(released, dtype=np.int32),
        forked=(),
        admitted=tuple(admitted),
        appended=(),
        copies=BlockCopies(no_int32(), no_int32()),
        exception_rows=columns[:, 0],
        exception_num_computed_tokens=columns[:, 1],
        exception_num_new_tokens=columns[:, 2],
    )


def _read_run(line: str) -> BenchRun:
    try:
        return BenchRun.model_validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "the run"
        raise ConfigError(f"{field}: {first['msg']}") from error


def _write(answers: TextIO, answer: dict[str, object]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()
