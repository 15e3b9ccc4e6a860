"""The model computes what `transformers` computes, for every variant of the Llama shape."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import transformers_oracle as oracle
from paged_logits import CPU, all_logits
from tiny_llama import VOCAB, write_tiny_llama
from worker_svc.model.causal_model import CausalModel
from worker_svc.model.native_operations import NativeOperations
from worker_svc.model.operations import Operations
from worker_svc.model.torch_operations import TorchOperations
from worker_svc.model.weights import load_model

PROMPT = [(7 * i * i + 3) % VOCAB for i in range(100)]

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 500.0,
}


@pytest.fixture(params=[TorchOperations, NativeOperations])
def operations(request: pytest.FixtureRequest) -> Operations:
    made: Operations = request.param()
    return made


def load(path: Path, operations: Operations, dtype: torch.dtype = torch.float32) -> CausalModel:
    return load_model(path, dtype, CPU, operations).model


def variants() -> dict[str, PreTrainedModel]:
    torch.manual_seed(0)
    return {
        "tied": LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)),
        "biases": LlamaForCausalLM(LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True)),
        "wide heads": LlamaForCausalLM(LlamaConfig(**SHAPE, head_dim=24)),
        "linear rope": LlamaForCausalLM(
            LlamaConfig(
                **SHAPE,
                rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
            )
        ),
        "llama3 rope": LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=LLAMA3)),
        "mistral": MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=None)),
        "windowed mistral": MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=5)),
        "qwen2": Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    }


@pytest.mark.parametrize("name", variants())
def test_every_variant_agrees_with_transformers(
    name: str, operations: Operations, tmp_path: Path
) -> None:
    theirs = variants()[name]
    # Random initialisation leaves biases 0 and norms 1; neither would be missed.
    for parameter in theirs.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
    theirs.save_pretrained(tmp_path)
    expected = oracle.logits(theirs, PROMPT)
    torch.testing.assert_close(
        all_logits(load(tmp_path, operations), PROMPT), expected, atol=2e-4, rtol=1e-4
    )


def test_the_tiny_llama_agrees_with_transformers_in_any_chunks(
    operations: Operations, tmp_path: Path
) -> None:
    write_tiny_llama(tmp_path)
    expected = oracle.logits(oracle.load_directory(tmp_path), PROMPT)
    model = load(tmp_path, operations)
    for chunk in (100, 7, 1):
        found = all_logits(model, PROMPT, chunk)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        assert torch.equal(found.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize(("dtype", "unit"), [(torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)])
def test_half_precision_is_as_near_to_float32_as_transformers_is(
    dtype: torch.dtype, unit: float, operations: Operations, tmp_path: Path
) -> None:
    write_tiny_llama(tmp_path)
    exact = all_logits(load(tmp_path, operations), PROMPT)
    ours = all_logits(load(tmp_path, operations, dtype), PROMPT)
    theirs = oracle.logits(oracle.load_directory(tmp_path, dtype), PROMPT).float()
    assert ours.dtype == torch.float32
    scale = exact.square().mean().sqrt()
    our_error = (ours - exact).square().mean().sqrt() / scale
    their_error = (theirs - exact).square().mean().sqrt() / scale
    assert unit / 10 < our_error < 1.5 * their_error


@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 8), (torch.float16, 11)])
def test_norms_are_rounded_once(dtype: torch.dtype, bits: int, operations: Operations) -> None:
    hidden, weight = torch.randn(50, 64).to(dtype), torch.randn(64).to(dtype)
    exact = hidden.double() / hidden.double().square().mean(-1, keepdim=True).sqrt()
    exact *= weight.double()
    found = operations.rms_norm(hidden, weight, 1e-12)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact, rtol=1.001 * 2.0**-bits, atol=2.0**-25)


def test_the_model_remembers_no_gradients(operations: Operations, tmp_path: Path) -> None:
    assert load(write_tiny_llama(tmp_path), operations).logits(torch.zeros(1, 64)).is_inference()
