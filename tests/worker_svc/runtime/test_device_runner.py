"""A runner that never waits for its device samples what the one that does would have sampled."""

import random
from pathlib import Path

import pytest
import torch

from plan_driver import PlanDriver, Sequence
from tiny_llama import VOCAB, write_tiny_llama
from worker_svc.model.torch_operations import TorchOperations
from worker_svc.model.weights import LoadedModel, load_model
from worker_svc.runtime.device_runner import DeviceRunner
from worker_svc.runtime.start_up import RunnerLimits, make_runner

LIMITS = RunnerLimits(block_size=4, max_num_seqs=8, max_model_len=64, num_gpu_blocks_override=60)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    directory = write_tiny_llama(tmp_path_factory.mktemp("tiny"))
    return load_model(directory, torch.float32, torch.device("cpu"), TorchOperations())


def device_runner(loaded: LoadedModel) -> DeviceRunner:
    runner, _ = make_runner(loaded, LIMITS)
    for layer in runner.kv_cache.layers:
        for cache in layer:
            cache.fill_(float("nan"))
    return DeviceRunner(loaded.model, runner.kv_cache, runner.rows)


def prompts(count: int) -> list[list[int]]:
    numbers = random.Random(5)
    return [
        [numbers.randrange(VOCAB) for _ in range(numbers.randrange(1, 20))] for _ in range(count)
    ]


def test_greedy_tokens_are_those_of_the_runner_that_waits(loaded: LoadedModel) -> None:
    waiting, _ = make_runner(loaded, LIMITS)
    beside = device_runner(loaded)
    for prompt in prompts(4):
        expected = PlanDriver(waiting).generate(Sequence(prompt), 9)
        waiting, _ = make_runner(loaded, LIMITS)
        assert PlanDriver(device_runner(loaded)).generate(Sequence(prompt), 9) == expected
    del beside
