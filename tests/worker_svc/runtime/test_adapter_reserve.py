"""Adapters that come after the KV cache find the room that was kept for them."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.cpu_build import native_code
from source_tree import ROOT
from tiny_adapter import ALL_MODULES, write_adapter
from tiny_llama import write_tiny_llama
from worker_svc.errors import ConfigError
from worker_svc.model.adapters import AdapterBank, LoadedAdapter
from worker_svc.model.checkpoint import read_model_config
from worker_svc.model.native_operations import NativeOperations
from worker_svc.model.operations import Operations
from worker_svc.model.other_ranks import NoOtherRanks
from worker_svc.model.peft_checkpoint import read_checkpoint
from worker_svc.model.shard import WHOLE, Shard
from worker_svc.model.torch_operations import TorchOperations
from worker_svc.model.weights import LoadedModel, load_model
from worker_svc.runtime import start_up
from worker_svc.runtime.adapter_reserve import AdapterReserve, reserve_for
from worker_svc.runtime.memory_budget import CPU_MEMORY_FRACTION, startup_lines
from worker_svc.runtime.start_up import RunnerLimits, make_runner

CPU = torch.device("cpu")
MAX_RANK = 8
FREE_BYTES = 10_000_000
DOCS = " ".join((ROOT / "docs/adapters.md").read_text(encoding="utf-8").split())


class Part(NoOtherRanks):
    """A rank that is loaded, and never runs."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a machine with a known number of free bytes."""
    name = "worker_svc.runtime.memory_budget.available_memory_bytes"
    monkeypatch.setattr(name, lambda: FREE_BYTES)


def load(
    model: Path, shard: Shard = WHOLE, operations: Operations | None = None
) -> tuple[LoadedModel, AdapterBank]:
    bank = AdapterBank(torch.float32, CPU)
    ranks = Part(shard)
    return load_model(model, torch.float32, CPU, operations, ranks, adapters=bank), bank


def prepared(bank: AdapterBank, directory: Path, **what: Any) -> LoadedAdapter:
    checkpoint = read_checkpoint(write_adapter(directory, **what), bank.targets, MAX_RANK)
    return bank.prepare(*checkpoint)


both_kinds = pytest.mark.parametrize("operations", [TorchOperations, NativeOperations])


@both_kinds
@settings(
    deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    rank=st.integers(1, MAX_RANK),
    modules=st.sets(st.sampled_from(ALL_MODULES), min_size=1),
    shard=st.sampled_from([WHOLE, Shard(0, 2), Shard(1, 2), Shard(2, 3), Shard(3, 4)]),
)
def test_no_adapter_that_is_taken_needs_more_than_its_share(
    model: Path,
    tmp_path: Path,
    operations: type[Operations],
    rank: int,
    modules: set[str],
    shard: Shard,
) -> None:
    _, bank = load(model, shard, operations())
    share = bank.largest_bytes(MAX_RANK)
    adapter = prepared(bank, tmp_path, rank=rank, modules=sorted(modules))
    assert adapter.num_bytes <= share
    assert reserve_for(bank, 5, MAX_RANK).num_bytes == 5 * share


def formula(rank: int, itemsize: int, sizes: tuple[int, ...], *, is_native: bool = False) -> int:
    E, Q, K, inner, layers = sizes
    width = 7 * E + 2 * Q + 2 * K + 3 * inner if is_native else 7 * E + 4 * Q + 6 * K + 5 * inner
    return rank * layers * itemsize * width


def test_the_formulas_of_the_docs_are_what_is_kept(model: Path) -> None:
    """docs/adapters.md has them, and what they make of a model of 8 billion."""
    config = read_model_config(model)
    E, D = config.hidden_size, config.head_dim
    Q, K = config.num_heads * D, config.num_kv_heads * D
    sizes = (E, Q, K, config.intermediate_size, config.num_layers)
    assert formula(MAX_RANK, 4, sizes) == load(model)[1].largest_bytes(MAX_RANK)
    if native_code() is not None:
        kept = load(model, operations=NativeOperations())[1].largest_bytes(64)
        # Beside it, where the ranks of each 16 outputs stand; and outputs to fill up the last 16.
        assert 1 <= kept / formula(64, 4, sizes, is_native=True) < 1.1
    eight_billion = (4096, 4096, 1024, 14336, 32)
    gib = [8 * formula(64, 2, eight_billion, is_native=native) / 2**30 for native in (False, True)]
    stated = re.search(r"8 billion .*?: ([\d.]+) GiB in bfloat16 on a GPU, ([\d.]+) on a CPU", DOCS)
    assert stated is not None
    assert [f"{each:.2f}" for each in gib] == list(stated.groups())
    assert "rank x layers x bytes x (7 E + 4 Q + 6 K + 5 I)" in DOCS
    assert "rank x layers x bytes x (7 E + 2 Q + 2 K + 3 I)" in DOCS


@both_kinds
@pytest.mark.parametrize("shard", [WHOLE, Shard(1, 2)])
def test_the_largest_adapter_needs_all_of_it(
    model: Path, tmp_path: Path, shard: Shard, operations: type[Operations]
) -> None:
    _, bank = load(model, shard, operations())
    adapter = prepared(bank, tmp_path, rank=MAX_RANK)
    assert adapter.num_bytes == bank.largest_bytes(MAX_RANK)


@pytest.mark.usefixtures("free_memory")
def test_a_cache_leaves_room_for_adapters_and_the_log_says_how_much(
    model: Path, tmp_path: Path
) -> None:
    loaded, bank = load(model)
    share = bank.largest_bytes(MAX_RANK)
    reserve = reserve_for(bank, 3, MAX_RANK)
    plain = make_runner(loaded, RunnerLimits(), adapters=bank)[1]
    report = make_runner(loaded, RunnerLimits(), adapters=bank, reserve=reserve)[1]
    left = int((FREE_BYTES - reserve.num_bytes) * CPU_MEMORY_FRACTION)
    assert report.num_blocks == left // report.block_bytes < plain.num_blocks
    gib, each = (f"{num_bytes / 2**30:.2f}" for num_bytes in (reserve.num_bytes, share))
    assert startup_lines(report)[-1] == (
        f"{gib} GiB kept for adapters, {each} for each: max_loras is 3, max_lora_rank is {MAX_RANK}"
    )
    assert not any("dapter" in line for line in startup_lines(plain))
    # What is loaded already is no longer free, and not kept twice.
    bank.publish(1, prepared(bank, tmp_path, rank=MAX_RANK))
    with_one = reserve_for(bank, 3, MAX_RANK)
    assert with_one.num_bytes == reserve.num_bytes
    assert with_one.num_bytes_left == reserve.num_bytes * 2 // 3


@pytest.mark.usefixtures("free_memory")
def test_a_reserve_that_leaves_no_room_for_a_request_is_named(model: Path) -> None:
    loaded, bank = load(model)
    reserve = reserve_for(bank, 500, MAX_RANK)
    with pytest.raises(ConfigError, match=r"max_model_len is 512: .*; .* GiB kept for adapters, .*"
                       r"max_loras is 500, max_lora_rank is 8$"):  # fmt: skip
        make_runner(loaded, RunnerLimits(), adapters=bank, reserve=reserve)


def test_a_cache_whose_size_is_given_is_not_made_smaller(model: Path) -> None:
    loaded, bank = load(model)
    reserve = reserve_for(bank, 500, MAX_RANK)
    limits = RunnerLimits(kv_cache_memory_bytes=1 << 20)
    plain = make_runner(loaded, limits, adapters=bank)[1]
    report = make_runner(loaded, limits, adapters=bank, reserve=reserve)[1]
    assert report.num_blocks == plain.num_blocks
    assert report.adapters.endswith("max_loras is 500, max_lora_rank is 8")


@pytest.mark.usefixtures("free_memory")
def test_ranks_of_one_machine_keep_room_for_the_adapters_of_all(model: Path) -> None:
    loaded, bank = load(model, Shard(1, 2))
    reserve = reserve_for(bank, 3, MAX_RANK)
    report = make_runner(loaded, RunnerLimits(), adapters=bank, reserve=reserve)[1]
    left = int((FREE_BYTES - 2 * reserve.num_bytes) * CPU_MEMORY_FRACTION) // 2
    assert report.num_blocks == left // report.block_bytes


@pytest.mark.parametrize(("measured", "left"), [(1000, 700), (200, 0)])
def test_a_gpu_keeps_it_out_of_what_it_measured(
    measured: int, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_up, "cuda_cache_bytes", lambda *_: measured)
    loaded: Any = SimpleNamespace(
        model=SimpleNamespace(device=torch.device("cuda")), ranks=NoOtherRanks()
    )
    reserve = AdapterReserve(3, MAX_RANK, num_bytes=450, num_bytes_taken=150)
    form: Any = None
    found = start_up._measure_cache_bytes(loaded, RunnerLimits(), form, reserve)
    assert found == left


def test_without_a_directory_of_adapters_nothing_is_kept() -> None:
    assert reserve_for(None, 8, 64).num_bytes == 0
    assert reserve_for(None, 8, 64).words == ""
