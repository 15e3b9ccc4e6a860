"""Whatever the plans do, all ranks' rows stay those of one runner with the whole model."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from fork_script import Alone, ForkScript
from plan_driver import PlanDriver, Sequence
from thread_ranks import on_all_ranks
from tiny_llama import VOCAB, write_tiny_llama
from worker_svc.model.other_ranks import OtherRanks
from worker_svc.model.torch_operations import TorchOperations
from worker_svc.model.weights import load_model
from worker_svc.runtime.model_runner import ModelRunner
from worker_svc.runtime.start_up import RunnerLimits, make_runner
from worker_svc.runtime.step_plan import StepPlan, StepResult
from worker_svc.service.process_group import ProcessGroup

CPU = torch.device("cpu")
BAD_TOKEN = 7


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that gives no finite logits behind one token."""
    path = write_tiny_llama(tmp_path_factory.mktemp("tiny"))
    tensors = load_file(path / "model.safetensors")
    tensors["model.embed_tokens.weight"][BAD_TOKEN] = float("nan")
    save_file(tensors, path / "model.safetensors")
    return path


def new_runner(path: Path, ranks: OtherRanks | None = None) -> ModelRunner:
    loaded = load_model(path, torch.float32, CPU, TorchOperations(), ranks)
    limits = RunnerLimits(
        block_size=4, max_num_seqs=6, max_model_len=32, num_gpu_blocks_override=120
    )
    return make_runner(loaded, limits)[0]


class Recorder:
    """A runner that remembers its plans and what it answered."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.plans: list[StepPlan] = []
        self.results: list[StepResult] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def run(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        self.results.append(self._runner.run(plan))
        return self.results[-1]


@dataclass
class Ran:
    """What a rank did with the plans."""

    answers: list[tuple[list[int], list[int], list[int], tuple[tuple[int, str], ...]]]
    rows: list[list[int]]


def answer(result: StepResult) -> tuple[Any, ...]:
    columns = (result.rows, result.tokens, result.num_tokens)
    return (*(column.tolist() for column in columns), result.row_errors)


def known_tokens(runner: ModelRunner) -> list[list[int]]:
    rows = runner.rows
    return [rows.tokens[row, :count].tolist() for row, count in enumerate(rows.num_tokens)]


def check(path: Path, recorder: Recorder, world_size: int) -> None:
    """Run the plans on ranks, and compare."""

    def run(group: ProcessGroup) -> tuple[list[tuple[Any, ...]], list[list[int]]]:
        runner = new_runner(path, group)
        return [answer(runner.run(plan)) for plan in recorder.plans], known_tokens(runner)

    ran = on_all_ranks(world_size, run)
    assert ran[0][0] == [answer(result) for result in recorder.results]
    for answers, rows in ran:
        assert rows == known_tokens(recorder._runner)
        assert [each[3] for each in answers] == [each.row_errors for each in recorder.results]
    assert all(not tokens for answers, _ in ran[1:] for _, tokens, _, _ in answers)


@pytest.mark.parametrize("world_size", [2, 4])
def test_forks_copies_and_several_samples(world_size: int, tiny: Path) -> None:
    """Four ranks have one query head each, and hold the two key/value heads twice."""
    whole = write_tiny_llama(tiny / "whole")
    recorder: Any = Recorder(new_runner(whole))
    script = ForkScript(recorder, Alone(new_runner(whole)), VOCAB, random.Random(3))
    for _ in range(30):
        script.step()
    check(whole, recorder, world_size)


def test_a_row_that_fails_fails_on_every_rank(tiny: Path) -> None:
    recorder: Any = Recorder(new_runner(tiny))
    driver = PlanDriver(recorder)
    good, bad = Sequence([1, 2, 3]), Sequence([1, BAD_TOKEN, 3])
    driver.step({good: 3, bad: 3})
    assert [row for result in recorder.results for row, _ in result.row_errors] == [bad.row]
    driver.release(bad)
    for _ in range(4):
        driver.step({good: 1})
    check(tiny, recorder, 2)


def test_every_rank_has_as_many_blocks_as_the_one_with_the_least_memory(tiny: Path) -> None:
    def run(group: ProcessGroup) -> int:
        loaded = load_model(tiny, torch.float32, CPU, TorchOperations(), group)
        memory = 100_000 * (1 + group.shard.rank)
        limits = RunnerLimits(block_size=4, max_model_len=32, kv_cache_memory_bytes=memory)
        return make_runner(loaded, limits)[1].num_blocks

    found = on_all_ranks(2, run)
    assert found[0] == found[1] == 100_000 // (2 * 4 * 16 * 4 * 2)
    assert np.array(found).min() > 0
