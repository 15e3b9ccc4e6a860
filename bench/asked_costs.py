"""What a step costs when its rows ask for more than greedy tokens, beside the same step without.

PYTHONPATH=.:proto:clients python3 bench/asked_costs.py --turns 12
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch

from kernels.cpu_threads import num_threads, take_threads_from_torch
from pagemill.cli.model_source import DEMO, resolve
from worker_svc.model.adapters import AdapterBank, LowRankMatrix
from worker_svc.model.native_operations import NativeOperations
from worker_svc.model.weights import LoadedModel, load_model
from worker_svc.runtime.model_runner import ModelRunner
from worker_svc.runtime.start_up import RunnerLimits, make_runner
from worker_svc.runtime.step_plan import (
    AdmittedRow,
    BlockCopies,
    Pooling,
    SamplingParams,
    StepPlan,
    no_int32,
)

CPU: Final = torch.device("cpu")
BLOCK_SIZE: Final = 16
DECODE_PROMPT: Final = 64


@dataclass(frozen=True, slots=True)
class Load:
    """Rows of one step, and what each asks for."""

    num_rows: int
    prompt_len: int
    decodes: bool
    """The step measured is not the prompts', but one behind them."""

    asked: dict[str, Any] = field(default_factory=dict)
    """Fields of `AdmittedRow`."""

    num_adapters: int | None = None
    """That rows have in turns; 0: the model takes adapters, and no row has one. None: it takes
    none."""


def _sampling(**params: Any) -> dict[str, Any]:
    return {"sampling": SamplingParams(**params)}


def _loads() -> dict[str, tuple[str, Load]]:
    """Return by name what is measured: what it is compared with, and the load."""
    ids, values = np.arange(100, 400, dtype=np.int32), np.full(300, 0.5, dtype=np.float32)
    decodes: dict[str, dict[str, Any]] = {
        "logprobs, drawn alone": {"logprobs": True},
        "logprobs, top 20": {"logprobs": True, "num_candidates": 20},
        "temperature 1": _sampling(temperature=1.0),
        "temperature 0.8, top_p 0.95": _sampling(temperature=0.8, top_p=0.95),
        "temperature 0.8, top_k 50, min_p 0.05": _sampling(temperature=0.8, top_k=50, min_p=0.05),
        "temperature 1.5, top_p 0.99": _sampling(temperature=1.5, top_p=0.99),
        "penalties": _sampling(repetition_penalty=1.1, frequency_penalty=0.3, presence_penalty=0.3),
        "300 biases": _sampling(bias_token_ids=ids, bias_values=values),
        "300 allowed ids": _sampling(allowed_token_ids=ids),
    }
    plain = Load(32, DECODE_PROMPT, decodes=True)
    prompt, texts = Load(1, 512, decodes=False), Load(8, 256, decodes=False)
    few = Load(16, DECODE_PROMPT, decodes=True)
    loads = {
        "32 rows": ("", plain),
        **{
            f"32 rows, {name}": ("32 rows", Load(32, DECODE_PROMPT, decodes=True, asked=asked))
            for name, asked in decodes.items()
        },
        "512 of a prompt": ("", prompt),
        "8 x 256 of prompts": ("", texts),
        "16 rows": ("", few),
    }
    for count in (0, 5):
        load = Load(1, 512, decodes=False, asked={"prompt_logprobs": count})
        loads[f"512 of a prompt, prompt_logprobs {count}"] = ("512 of a prompt", load)
    for pooling in Pooling:
        load = Load(8, 256, decodes=False, asked={"pooling": pooling})
        loads[f"8 x 256 of prompts, pooled {pooling.name}"] = ("8 x 256 of prompts", load)
    for count in (0, 1, 2):
        load = Load(16, DECODE_PROMPT, decodes=True, num_adapters=count)
        loads[f"16 rows, {count} adapters"] = ("16 rows", load)
        load = Load(1 if count < 2 else 2, 512 if count < 2 else 256, decodes=False,
                    num_adapters=count)  # fmt: skip
        loads[f"512 of a prompt, {count} adapters"] = ("512 of a prompt", load)
    loads["1 row"] = ("", Load(1, DECODE_PROMPT, decodes=True))
    load = Load(1, DECODE_PROMPT, decodes=True, num_adapters=1)
    loads["1 row, 1 adapters"] = ("1 row", load)
    return loads


class Stepper:
    """A runner of its own, and the plans of one load's steps."""

    def __init__(self, loaded: LoadedModel, load: Load, bank: AdapterBank | None) -> None:
        self._load = load
        self._width = -(-(load.prompt_len + 256) // BLOCK_SIZE)
        limits = RunnerLimits(
            block_size=BLOCK_SIZE,
            max_num_seqs=32,
            max_num_batched_tokens=4096,
            max_model_len=self._width * BLOCK_SIZE,
            num_gpu_blocks_override=load.num_rows * self._width,
        )
        self._runner: ModelRunner = make_runner(loaded, limits, adapters=bank)[0]
        self._step_id = 0
        if load.decodes:
            self._runner.run(self._plan(is_first=True))

    def step(self) -> float:
        """Run one step; return its seconds, by the worker's clock."""
        plan = self._plan(is_first=not self._load.decodes)
        started = time.perf_counter()
        result = self._runner.run(plan)
        seconds = time.perf_counter() - started
        if result.row_errors:
            raise RuntimeError(f"rows failed: {result.row_errors}")
        return seconds

    def _plan(self, *, is_first: bool) -> StepPlan:
        admitted = tuple(map(self._admit, range(self._load.num_rows))) if is_first else ()
        step_id, self._step_id = self._step_id, self._step_id + 1
        none = no_int32()
        return StepPlan(
            step_id, is_first, none, (), admitted, (), BlockCopies(none, none), none, none, none
        )

    def _admit(self, row: int) -> AdmittedRow:
        load, first = self._load, 1 + row * self._width
        draw = np.random.default_rng(row)
        asked: dict[str, Any] = {"sampling": SamplingParams(), **load.asked}
        return AdmittedRow(
            row=row,
            request_id=str(row),
            tokens=draw.integers(0, 49152, load.prompt_len).astype(np.int32),
            num_prompt_tokens=load.prompt_len,
            num_computed_tokens=0,
            num_new_tokens=load.prompt_len,
            block_tables=(np.arange(first, first + self._width, dtype=np.int32),),
            adapter=1 + row % load.num_adapters if load.num_adapters else 0,
            **asked,
        )


def _fill(bank: AdapterBank, rank: int) -> None:
    """Publish two adapters of a rank that change every matrix."""
    for slot in (1, 2):
        draw = torch.Generator().manual_seed(slot)
        matrices = {
            name: LowRankMatrix(
                torch.randn(rank, len(target.columns.mine), generator=draw) * 0.01,
                torch.randn(len(target.rows.mine), rank, generator=draw) * 0.01,
            )
            for name, target in bank.targets.items()
        }
        bank.publish(slot, bank.prepare(slot, matrices))


def _lines(seconds: dict[str, list[float]], against: dict[str, str]) -> Iterator[dict[str, object]]:
    for name, own in seconds.items():
        line: dict[str, object] = {"step": name, "ms": round(1000 * statistics.median(own), 2)}
        if plain := against[name]:
            pairs = zip(own, seconds[plain], strict=True)
            line["times"] = round(statistics.median(mine / other for mine, other in pairs), 3)
            line["against"] = plain
        yield line


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, all loads in turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument("--only", default="", help="what a step's name must hold")
    options = parser.parse_args(argv)
    path, dtype = resolve(DEMO).path, getattr(torch, options.dtype)
    bank = AdapterBank(dtype, CPU)
    plain = load_model(path, dtype, CPU, NativeOperations())
    adapted = load_model(path, dtype, CPU, NativeOperations(), adapters=bank)
    torch.set_num_threads(options.threads)
    take_threads_from_torch()
    _fill(bank, options.rank)
    loads = {name: each for name, each in _loads().items() if options.only in name or not each[0]}
    needed = {each[0] for each in loads.values()} | {n for n in loads if options.only in n}
    steppers = {
        name: Stepper(plain, load, None)
        if load.num_adapters is None
        else Stepper(adapted, load, bank)
        for name, (_, load) in loads.items()
        if name in needed
    }
    seconds: dict[str, list[float]] = {name: [] for name in steppers}
    for turn in range(options.turns + 1):
        for name, stepper in steppers.items():
            took = stepper.step()
            if turn:
                seconds[name].append(took)
    against = {name: loads[name][0] for name in steppers}
    for line in _lines(seconds, against):
        sys.stdout.write(json.dumps({**line, "threads": num_threads()}) + "\n")


if __name__ == "__main__":
    main()
