"""Every model family computes what `transformers` computes."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import transformers_oracle as oracle
from gguf_families import write_gguf
from kernels.cpu_build import native_code
from paged_logits import CPU, all_logits
from tiny_families import FAMILIES, VOCAB, write_family
from worker_svc.model import families
from worker_svc.model.model_config import KNOWN_HF_ARCHITECTURES, Family
from worker_svc.model.native_operations import NativeOperations
from worker_svc.model.operations import (
    LayerCache,
    LayerParts,
    LayerStack,
    Operations,
    StackShape,
    StepColumns,
)
from worker_svc.model.torch_operations import TorchOperations
from worker_svc.model.weights import load_model

PROMPT = [(7 * i * i + 3) % VOCAB for i in range(75)]


@pytest.mark.parametrize("operations", [TorchOperations, NativeOperations])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers_in_any_chunks(
    name: str, operations: type[Operations], tmp_path: Path
) -> None:
    theirs = write_family(name, tmp_path)
    model = load_model(tmp_path, torch.float32, CPU, operations()).model
    expected = oracle.logits(theirs, PROMPT)
    for chunk in (75, 11, 1):
        found = all_logits(model, PROMPT, chunk)
        torch.testing.assert_close(found, expected, atol=3e-4, rtol=1e-3)
        assert torch.equal(found.argmax(-1), expected.argmax(-1))


class CountsStacks(NativeOperations):
    """Remembers which layers run as one, and how often."""

    def __init__(self) -> None:
        super().__init__()
        self.num_runs = 0

    def stack(
        self, layers: Sequence[LayerParts], last_norm: torch.Tensor, shape: StackShape
    ) -> LayerStack | None:
        """As `NativeOperations.stack`, counted."""
        stack = super().stack(layers, last_norm, shape)
        return None if stack is None else CountedStack(self, stack)


class CountedStack:
    """A stack that counts its runs."""

    def __init__(self, counts: CountsStacks, stack: LayerStack) -> None:
        self.counts = counts
        self.stack = stack

    def run(
        self,
        hidden: torch.Tensor,
        columns: Sequence[StepColumns],
        inverse_frequencies: Sequence[torch.Tensor],
        caches: Sequence[LayerCache],
    ) -> torch.Tensor:
        """As `LayerStack.run`."""
        self.counts.num_runs += 1
        return self.stack.run(hidden, columns, inverse_frequencies, caches)


@pytest.mark.skipif(native_code() is None, reason="this machine compiles no C++")
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_layers_run_in_one_native_call(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    write_family(name, tmp_path)
    operations = CountsStacks()
    all_logits(load_model(tmp_path, dtype, CPU, operations).model, PROMPT, 25)
    assert operations.num_runs == 3


@pytest.mark.parametrize(
    "name",
    ["llama 2", "qwen2", "qwen3", "gemma3 as GGUF knows it", "mixtral", "qwen3-moe normalised"],
)
def test_a_gguf_file_gives_the_logits_of_what_it_was_made_of(name: str, tmp_path: Path) -> None:
    theirs = write_family(name, tmp_path)
    model = load_model(write_gguf(theirs, tmp_path / "tiny.gguf"), torch.float32, CPU).model
    expected = oracle.logits(theirs, PROMPT)
    torch.testing.assert_close(all_logits(model, PROMPT), expected, atol=3e-4, rtol=1e-3)


@pytest.mark.parametrize("operations", [TorchOperations, NativeOperations])
@pytest.mark.parametrize("name", ["qwen3", "gemma3", "mixtral", "qwen3-moe"])
def test_bfloat16_is_as_near_to_float32_as_transformers_is(
    name: str, operations: type[Operations], tmp_path: Path
) -> None:
    theirs = write_family(name, tmp_path)
    exact = oracle.logits(theirs, PROMPT)
    ours = all_logits(load_model(tmp_path, torch.bfloat16, CPU, operations()).model, PROMPT)
    rough = oracle.logits(theirs.bfloat16(), PROMPT).float()
    our_error, their_error = (
        # The median: where two experts are almost as likely, rounding chooses another.
        (found - exact).square().mean(dim=-1).median()
        for found in (ours, rough)
    )
    assert 0 < our_error < 1.5**2 * their_error


def test_every_family_has_a_model_and_an_architecture() -> None:
    assert set(families.FAMILIES) == set(Family) == set(KNOWN_HF_ARCHITECTURES.values())
