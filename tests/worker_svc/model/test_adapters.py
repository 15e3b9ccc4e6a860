"""Tokens have their own row's adapter: as if its weights were merged, and no other's."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import transformers_oracle as oracle
from paged_logits import all_logits
from plan_driver import PlanDriver, Sequence, int32, make_plan
from tiny_adapter import write_adapter, write_merged
from tiny_llama import VOCAB, write_tiny_llama
from worker_svc.model.adapters import AdapterBank
from worker_svc.model.llama import Llama
from worker_svc.model.native_operations import NativeOperations
from worker_svc.model.operations import Operations
from worker_svc.model.peft_checkpoint import read_checkpoint
from worker_svc.model.quantised_operations import QuantisedOperations
from worker_svc.model.torch_adapted import LayerChange
from worker_svc.model.torch_operations import TorchOperations
from worker_svc.model.weights import load_model
from worker_svc.runtime.model_runner import ModelRunner
from worker_svc.runtime.start_up import RunnerLimits, make_runner
from worker_svc.runtime.step_plan import AdmittedRow, Draft, SamplingParams

CPU = torch.device("cpu")
LIMITS = RunnerLimits(block_size=4, max_num_seqs=8, max_model_len=64, num_gpu_blocks_override=60)
PROMPT = [104, 101, 108, 108, 111, 32]
# Slot: what is in it. Of three ranks, and not all of all modules.
ADAPTERS: dict[int, dict[str, object]] = {
    1: {"seed": 1},
    2: {"seed": 2, "rank": 3, "alpha": 6.0, "modules": ("q_proj", "v_proj", "down_proj")},
    3: {"seed": 3, "rank": 9, "use_rslora": True, "modules": ("k_proj", "up_proj", "o_proj")},
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the model and, for each slot, an adapter and the merged model."""
    root = tmp_path_factory.mktemp("adapters")
    write_tiny_llama(root / "0")
    for slot, what in ADAPTERS.items():
        write_merged(root / str(slot), write_adapter(root / f"a{slot}", **what))  # type: ignore[arg-type]  # any
    return root


@pytest.fixture(scope="module", params=[TorchOperations, NativeOperations])
def new_runner(request: pytest.FixtureRequest, places: Path) -> Callable[[], ModelRunner]:
    operations: Operations = request.param()
    bank = AdapterBank(torch.float32, CPU)
    loaded = load_model(places / "0", torch.float32, CPU, operations, adapters=bank)
    for slot in ADAPTERS:
        checkpoint = read_checkpoint(places / f"a{slot}", bank.targets, 64)
        bank.publish(slot, bank.prepare(*checkpoint))

    def make() -> ModelRunner:
        return make_runner(loaded, LIMITS, adapters=bank)[0]

    return make


@pytest.fixture(scope="module")
def alone(places: Path) -> dict[int, list[int]]:
    """Greedy tokens of transformers over the merged weights, by slot."""
    return {
        slot: oracle.greedy(oracle.load_directory(places / str(slot)), PROMPT, 10)
        for slot in range(4)
    }


def test_the_oracles_differ(alone: dict[int, list[int]]) -> None:
    assert len({tuple(tokens) for tokens in alone.values()}) == 4


@settings(max_examples=12, deadline=None)
@given(slots=st.lists(st.integers(0, 3), min_size=1, max_size=6), chunk=st.integers(1, 6))
def test_batched_adapters_give_the_tokens_of_merged_weights(
    new_runner: Callable[[], ModelRunner],
    alone: dict[int, list[int]],
    slots: list[int],
    chunk: int,
) -> None:
    driver = PlanDriver(new_runner())
    sequences = [Sequence(PROMPT, adapter=slot) for slot in slots]
    while left := [each for each in sequences if len(each.output) < 10]:
        driver.step({s: min(chunk, s.num_tokens - s.num_computed_tokens) for s in left})
    assert [each.output for each in sequences] == [alone[slot] for slot in slots]


def test_logits_are_those_of_merged_weights(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bank = AdapterBank(torch.float32, CPU)
    loaded = load_model(places / "0", torch.float32, CPU, adapters=bank)
    bank.publish(1, bank.prepare(*read_checkpoint(places / "a1", bank.targets, 64)))
    runner, _ = make_runner(
        loaded,
        RunnerLimits(block_size=4, max_model_len=64, num_gpu_blocks_override=60),
        adapters=bank,
    )
    seen: list[torch.Tensor] = []
    compute = Llama.logits

    def noted(model: Llama, hidden: torch.Tensor) -> torch.Tensor:
        seen.append(compute(model, hidden))
        return seen[-1]

    monkeypatch.setattr(Llama, "logits", noted)
    PlanDriver(runner).generate(Sequence(PROMPT, adapter=1), 1)
    theirs = oracle.logits(oracle.load_directory(places / "1"), PROMPT)[-1]
    torch.testing.assert_close(seen[0][0], theirs, rtol=1e-4, atol=1e-4)


def test_a_row_without_its_adapter_fails_alone(
    new_runner: Callable[[], ModelRunner], alone: dict[int, list[int]]
) -> None:
    driver = PlanDriver(new_runner())
    lost, well = Sequence(PROMPT, adapter=4), Sequence(PROMPT, adapter=1)
    result = driver.step({lost: len(PROMPT), well: len(PROMPT)})
    assert result.row_errors == ((lost.row, "adapter 4 is not loaded here"),)
    assert well.output == alone[1][:1]


def torch_runner(places: Path) -> ModelRunner:
    """Return a runner whose layers have no native code."""
    bank = AdapterBank(torch.float32, CPU)
    loaded = load_model(places / "0", torch.float32, CPU, TorchOperations(), adapters=bank)
    for slot in ADAPTERS:
        bank.publish(slot, bank.prepare(*read_checkpoint(places / f"a{slot}", bank.targets, 64)))
    return make_runner(loaded, LIMITS, adapters=bank)[0]


def test_a_step_without_adapters_multiplies_nothing_more(
    places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(LayerChange, "add", lambda *_: calls.append(1))
    driver = PlanDriver(torch_runner(places))
    driver.generate(Sequence(PROMPT), 2)
    assert calls == []
    driver.generate(Sequence(PROMPT, adapter=1), 1)
    assert len(calls) == 2 * 4


def test_many_tokens_at_once_are_as_many_few(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = []
    for few in (0, 64):
        monkeypatch.setattr("worker_svc.model.torch_adapted._FEW_TOKENS", few)
        driver = PlanDriver(torch_runner(places))
        sequences = [Sequence(PROMPT * 3, adapter=slot) for slot in (1, 0, 2, 3, 2)]
        while left := [each for each in sequences if len(each.output) < 8]:
            driver.step({s: s.num_tokens - s.num_computed_tokens for s in left})
        outputs.append([each.output for each in sequences])
    assert outputs[0] == outputs[1]


def test_an_adapter_is_added_to_quantised_layers(places: Path) -> None:
    found = {}
    for slot in (0, 1):
        bank = AdapterBank(torch.float32, CPU)
        operations = QuantisedOperations(8, torch.float32)
        model = load_model(places / "0", torch.float32, CPU, operations, adapters=bank).model
        bank.publish(1, bank.prepare(*read_checkpoint(places / "a1", bank.targets, 64)))
        bank.begin(np.array([slot], np.int32), np.array([len(PROMPT)], np.int32))
        found[slot] = all_logits(model, PROMPT)
    merged = oracle.logits(oracle.load_directory(places / "1"), PROMPT)
    away = {slot: float((each - merged).norm() / merged.norm()) for slot, each in found.items()}
    assert away[1] < 0.1 < away[0]


@pytest.mark.parametrize("num_right", [0, 2])
def test_a_row_with_an_adapter_may_draft(
    new_runner: Callable[[], ModelRunner], alone: dict[int, list[int]], num_right: int
) -> None:
    runner, expected = new_runner(), alone[1]
    row = AdmittedRow(
        row=0,
        request_id="r",
        tokens=int32(*PROMPT),
        num_prompt_tokens=len(PROMPT),
        num_computed_tokens=0,
        num_new_tokens=len(PROMPT),
        block_tables=(int32(1, 2, 3, 4),),
        sampling=SamplingParams(),
        adapter=1,
    )
    assert runner.run(make_plan(0, reset=True, admitted=[row])).tokens.tolist() == expected[:1]
    drafted = [*expected[1 : 1 + num_right], (expected[1 + num_right] + 1) % VOCAB]
    plan = make_plan(1, exceptions=[(0, len(PROMPT), 1 + len(drafted))])
    result = runner.run(replace(plan, drafts=(Draft(0, int32(*drafted)),)))
    assert result.tokens.tolist() == expected[1 : 2 + num_right]
