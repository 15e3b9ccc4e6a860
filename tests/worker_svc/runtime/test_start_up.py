"""A runner is made within its limits, or refused by an error that names the limit."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tiny_families import write_family
from tiny_llama import write_tiny_llama
from worker_svc.errors import ConfigError
from worker_svc.model.weights import LoadedModel, load_model
from worker_svc.runtime import start_up
from worker_svc.runtime.kv_cache import block_bytes
from worker_svc.runtime.memory_budget import GIB, MAX_CPU_BYTES, startup_lines
from worker_svc.runtime.start_up import RunnerLimits, make_runner, run_largest_step


@pytest.fixture
def loaded(tmp_path: Path) -> LoadedModel:
    return load_model(write_tiny_llama(tmp_path), torch.float32, torch.device("cpu"))


def test_an_override_is_the_number_of_usable_blocks(loaded: LoadedModel) -> None:
    # 3 blocks hold 48 of the model's 512 tokens; it is for the scheduler to refuse what is longer.
    runner, report = make_runner(loaded, RunnerLimits(num_gpu_blocks_override=3))
    assert runner.kv_cache.num_blocks == report.num_blocks == 3
    assert runner.kv_cache.layers[0][0].shape[0] == 4
    assert report.max_concurrency == 3 / 32


def test_bytes_given_are_divided(loaded: LoadedModel) -> None:
    num_bytes = 32 * block_bytes(loaded.model.config, 16, torch.float32) + 5
    runner, report = make_runner(loaded, RunnerLimits(kv_cache_memory_bytes=num_bytes))
    assert runner.kv_cache.num_blocks == 32
    assert (report.max_model_len, report.max_concurrency) == (512, 1.0)
    with pytest.raises(ConfigError, match=r"needs 0.00 GiB .* must be at most 496"):
        make_runner(loaded, RunnerLimits(kv_cache_memory_bytes=num_bytes - 6))


@pytest.mark.parametrize(
    ("num_bytes", "bound"), [(8_000, "not one block fits"), (10_000, "must be at most 16")]
)
def test_bytes_given_that_hold_no_request_are_named(
    loaded: LoadedModel, num_bytes: int, bound: str
) -> None:
    assert block_bytes(loaded.model.config, 16, torch.float32) == 8_192
    with pytest.raises(ConfigError) as refusal:
        make_runner(loaded, RunnerLimits(kv_cache_memory_bytes=num_bytes))
    assert str(refusal.value).endswith(f"{bound} (kv_cache_memory_bytes is {num_bytes}, give more)")


@pytest.mark.parametrize(
    ("setting", "value"), [("kv_cache_memory_bytes", 10**12), ("num_gpu_blocks_override", 10**8)]
)
def test_a_cache_larger_than_the_machine_is_refused_by_its_setting(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, setting: str, value: int
) -> None:
    """The system would give it page by page, and kill the worker in the middle of its work."""
    monkeypatch.setattr(start_up, "total_memory_bytes", lambda: 10**11)
    with pytest.raises(ConfigError, match=rf"^{setting} is {value}: .* at most 93.13, the memory"):
        make_runner(loaded, RunnerLimits(**{setting: value}))


@pytest.mark.parametrize("error", [OSError(12, "Cannot allocate"), torch.OutOfMemoryError("full")])
def test_a_cache_that_cannot_be_had_is_an_error_of_the_setting_that_wants_it(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(start_up, "KVCache", refuse)
    with pytest.raises(ConfigError, match=r"^num_gpu_blocks_override is 40: .* cannot be had"):
        make_runner(loaded, RunnerLimits(num_gpu_blocks_override=40))
    # One that was measured may find room the next time.
    with pytest.raises(type(error)):
        make_runner(loaded, RunnerLimits())


def test_a_window_needs_no_memory_for_the_whole_length(loaded: LoadedModel) -> None:
    loaded.model.config = replace(loaded.model.config, sliding_window=33)
    # 32 tokens that the first of a step sees, 64 of the step, and a block begun inside: 7 blocks.
    num_bytes = 7 * block_bytes(loaded.model.config, 16, torch.float32)
    limits = RunnerLimits(kv_cache_memory_bytes=num_bytes, max_num_batched_tokens=64)
    assert make_runner(loaded, limits)[0].kv_cache.num_blocks == 7
    with pytest.raises(ConfigError, match="max_model_len is 512"):
        make_runner(loaded, replace(limits, kv_cache_memory_bytes=num_bytes - 1))


def test_a_request_of_several_groups_counts_the_blocks_of_all(tmp_path: Path) -> None:
    write_family("gemma3", tmp_path)
    loaded = load_model(tmp_path, torch.float32, torch.device("cpu"))
    limits = RunnerLimits(block_size=4, max_num_batched_tokens=16, max_num_seqs=4)
    # Of 128 tokens the layer that sees all holds 32 blocks; each of the six with a window of 7
    # holds what the first of 16 tokens sees, up to the last, and a block begun inside.
    needed = 32 + 6 * 7
    per_block = block_bytes(loaded.model.config, 4, torch.float32)
    _, report = make_runner(loaded, replace(limits, kv_cache_memory_bytes=needed * per_block))
    assert report.blocks_per_request == report.num_blocks == needed
    assert report.max_concurrency == 1.0
    with pytest.raises(ConfigError, match="must be at most 124"):
        make_runner(loaded, replace(limits, kv_cache_memory_bytes=needed * per_block - 1))
    run_largest_step(loaded.model, limits)


def test_memory_is_measured_unless_it_is_given(loaded: LoadedModel) -> None:
    _, report = make_runner(loaded, RunnerLimits())
    assert GIB // 100 < report.num_blocks * report.block_bytes <= MAX_CPU_BYTES
    assert report.weight_bytes == loaded.weight_bytes


def test_a_length_beyond_the_models_is_refused(loaded: LoadedModel) -> None:
    make_runner(loaded, RunnerLimits(max_model_len=512))
    with pytest.raises(ConfigError, match="max_model_len is 513, must be at most 512"):
        make_runner(loaded, RunnerLimits(max_model_len=513))


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"block_size": 12}, "block_size is 12, must be a power of two"),
        ({"block_size": 0}, "block_size is 0"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0, must be at least 1"),
        ({"max_num_batched_tokens": -5}, "max_num_batched_tokens is -5"),
        ({"max_model_len": 0}, "max_model_len is 0"),
        ({"kv_cache_memory_bytes": 0}, "kv_cache_memory_bytes is 0"),
        ({"num_gpu_blocks_override": 0}, "num_gpu_blocks_override is 0"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization is 1.5"),
        ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization is nan"),
    ],
)
def test_impossible_limits_are_named(limits: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RunnerLimits(**limits)


@pytest.mark.parametrize(("rows", "tokens"), [(1, 40), (8, 40), (8, 8), (64, 8)])
def test_the_largest_step_can_be_rehearsed(loaded: LoadedModel, rows: int, tokens: int) -> None:
    """On a GPU its memory is measured; here it shows that the step fits together."""
    run_largest_step(loaded.model, RunnerLimits(max_num_seqs=rows, max_num_batched_tokens=tokens))


def test_blocks_that_hold_no_longest_request_are_said_to(loaded: LoadedModel) -> None:
    _, report = make_runner(loaded, RunnerLimits(num_gpu_blocks_override=3))
    assert startup_lines(report)[-1] == (
        "max_model_len is 512, and the KV cache holds less: the longest request that fits has "
        "48 tokens"
    )
    _, enough = make_runner(loaded, RunnerLimits(num_gpu_blocks_override=32))
    assert len(startup_lines(enough)) == 3
