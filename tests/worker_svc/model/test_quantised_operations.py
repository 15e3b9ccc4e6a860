"""A model whose linear layers hold 4 or 8 bits: near the plain one, and true to a file's values."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import LlamaConfig, LlamaForCausalLM

from kernels.activation import Activation
from kernels.native_linear import HasNativeLinear
from kernels.quantised_linear import quantise
from paged_logits import all_logits
from worker_svc.model.causal_model import CausalModel
from worker_svc.model.fingerprint import model_fingerprint
from worker_svc.model.native_operations import NativeOperations
from worker_svc.model.operations import Operations
from worker_svc.model.quantised_operations import QuantisedOperations
from worker_svc.model.weights import load_model

CPU = torch.device("cpu")
CONFIG: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize(("kind", "bits"), [(Kind.Q4_1, 4), (Kind.Q8_0, 8)])
def test_values_of_a_gguf_file_are_found_again(kind: Kind, bits: int) -> None:
    weight = np.random.default_rng(0).standard_normal((40, 256)).astype(np.float32)
    stored = torch.from_numpy(gguf.dequantize(gguf.quantize(weight, kind), kind))
    again = quantise(stored, bits)
    # Scale and minimum are the file's, bit for bit; products are rounded to fp32 here and there.
    torch.testing.assert_close(again.dequantise(), stored, rtol=1e-6, atol=1e-6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    config = LlamaConfig(**CONFIG, tie_word_embeddings=True, initializer_range=0.2)
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def load(folder: Path, operations: Operations, dtype: torch.dtype = torch.float32) -> CausalModel:
    return load_model(folder, dtype, CPU, operations).model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("bits", "error"), [(8, 0.06), (4, 0.6)])
def test_logits_are_near_those_of_plain_weights(
    folder: Path, bits: int, error: float, dtype: torch.dtype
) -> None:
    tokens = torch.randint(0, 96, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    plain = all_logits(load(folder, NativeOperations()), tokens)
    found = all_logits(load(folder, QuantisedOperations(bits, dtype), dtype), tokens)
    away = (found - plain).norm() / plain.norm()
    # And not the same: that would be the plain weights.
    assert error / 100 < away < error


def test_what_weights_take_is_counted_as_packed(folder: Path) -> None:
    plain = load_model(folder, torch.bfloat16, CPU, NativeOperations()).weight_bytes
    packed = load_model(folder, torch.bfloat16, CPU, QuantisedOperations(4, torch.bfloat16))
    in_layers = 2 * (64 * 128 + 64 * 64 + 192 * 64 + 96 * 64)
    norms = 5 * 64 * 2
    embedding = 96 * 64 * 2
    assert plain == 2 * in_layers + norms + embedding
    head = 96 * 64 * 17 // 16
    assert packed.weight_bytes == in_layers * 5 // 8 + head + norms + embedding


@pytest.mark.parametrize("bits", [4, 8])
def test_every_layer_can_be_called_by_native_code(bits: int) -> None:
    operations = QuantisedOperations(bits, torch.bfloat16)
    weight = torch.randn(64, 96)
    linears: list[object] = [
        operations.linear(weight, None),
        operations.gated_linear(weight, None, Activation.SILU),
    ]
    for linear in linears:
        assert isinstance(linear, HasNativeLinear)
        assert linear.native is not None


def test_rounded_weights_are_another_model(folder: Path) -> None:
    names = {model_fingerprint(folder, kind) for kind in ("none", "int8", "int4")}
    assert len(names) == 3
    assert model_fingerprint(folder) in names
