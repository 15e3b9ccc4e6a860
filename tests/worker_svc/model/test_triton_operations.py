"""On a GPU's kernels, here interpreted, model families compute what `transformers` computes."""

from pathlib import Path

import pytest
import torch

import transformers_oracle as oracle
from launching import launching
from paged_logits import CPU, all_logits
from plan_driver import PlanDriver, Sequence
from tiny_families import SEVEN_LAYERS, SHAPE, VOCAB, write_family
from worker_svc.model.triton_operations import TritonOperations
from worker_svc.model.weights import load_model
from worker_svc.runtime.start_up import RunnerLimits, make_runner

PROMPT = [(7 * i * i + 3) % VOCAB for i in range(11)]


@pytest.fixture(autouse=True)
def heads_that_gpu_kernels_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    for shape in (SHAPE, SEVEN_LAYERS):
        monkeypatch.setitem(shape, "head_dim", 64)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "gemma3", "qwen3-moe"])
def test_logits_are_those_of_transformers_in_any_chunks(name: str, tmp_path: Path) -> None:
    theirs = write_family(name, tmp_path)
    model = load_model(tmp_path, torch.float32, CPU, TritonOperations()).model
    expected = oracle.logits(theirs, PROMPT)
    # One by one they are decoded, which is another kernel's work, and slow to interpret.
    for chunk in (11, 1) if name in {"mistral", "gemma3"} else (11, 3):
        found = all_logits(model, PROMPT, chunk)
        torch.testing.assert_close(found, expected, atol=3e-4, rtol=1e-3)


def test_launched_steps_give_the_tokens_of_transformers(tmp_path: Path) -> None:
    theirs = write_family("llama", tmp_path)
    loaded = load_model(tmp_path, torch.float32, CPU, TritonOperations())
    limits = RunnerLimits(block_size=8, max_num_seqs=3, num_gpu_blocks_override=40)
    driver = PlanDriver(launching(loaded, make_runner(loaded, limits)[0]))
    assert driver.generate(Sequence(PROMPT), 4) == oracle.greedy(theirs, PROMPT, 4)


def test_only_a_model_whose_shapes_are_known_beforehand_can_be_recorded(tmp_path: Path) -> None:
    for name, recorded in (("llama", True), ("mixtral", False)):
        write_family(name, tmp_path / name)
        loaded = load_model(tmp_path / name, torch.float32, CPU, TritonOperations())
        assert loaded.model.can_be_recorded is recorded
