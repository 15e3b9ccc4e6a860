"""Every model family computes what `transformers` computes."""

from pathlib import Path
from typing import Any

import pytest
import torch

import transformers_oracle as oracle
from gguf_families import write_gguf
from kernels.cpu_build import native_code
from kernels.cpu_decoder import Decoder
from paged_logits import CPU, all_logits
from tiny_families import FAMILIES, VOCAB, write_family
from worker_svc.model import families
from worker_svc.model.adapters import AdapterBank
from worker_svc.model.model_config import KNOWN_HF_ARCHITECTURES, Family
from worker_svc.model.native_operations import NativeOperations
from worker_svc.model.operations import Operations
from worker_svc.model.quantised_operations import QuantisedOperations
from worker_svc.model.torch_operations import TorchOperations
from worker_svc.model.weights import load_model

# Correlation with float32's logits; what has 4 bits is far off in random models.
AT_LEAST = {"float32": 0.99999, "bfloat16": 0.998, "int8": 0.97, "int4": 0.7}
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


@pytest.mark.skipif(native_code() is None, reason="this machine compiles no C++")
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("name", FAMILIES)
def test_all_layers_run_in_one_native_call(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_tokens, run = [], Decoder.run

    def counted(self: Decoder, hidden: torch.Tensor, *others: Any) -> torch.Tensor:
        num_tokens.append(len(hidden))
        return run(self, hidden, *others)

    monkeypatch.setattr(Decoder, "run", counted)
    theirs = write_family(name, tmp_path)
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    operations = NativeOperations()
    if kind.startswith("int"):
        operations = QuantisedOperations(int(kind[3:]), dtype)
    model = load_model(tmp_path, dtype, CPU, operations).model
    found = all_logits(model, PROMPT, 25)
    assert num_tokens == [25, 25, 25]
    both = torch.stack((found.flatten(), oracle.logits(theirs, PROMPT).flatten()))
    assert torch.corrcoef(both)[0, 1] > AT_LEAST[kind]


@pytest.mark.parametrize("operations", [TorchOperations, NativeOperations])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "qwen3-moe with dense layers"])
def test_a_model_that_takes_adapters_is_the_same_model_without_any(
    name: str, operations: type[Operations], tmp_path: Path
) -> None:
    theirs = write_family(name, tmp_path)
    bank = AdapterBank(torch.float32, CPU)
    model = load_model(tmp_path, torch.float32, CPU, operations(), adapters=bank).model
    expected = oracle.logits(theirs, PROMPT)
    torch.testing.assert_close(all_logits(model, PROMPT, 25), expected, atol=3e-4, rtol=1e-3)


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
