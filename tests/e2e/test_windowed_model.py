"""A model with a sliding window, from the core over both wires to the real runtime."""

# mypy: allow-untyped-calls

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

import transformers_oracle as oracle
from scheduler_svc.core.kv_groups import KvGroup
from wired_pair import BLOCK_SIZE, BUDGET, WiredPair, ask
from worker_svc.model.native_operations import NativeOperations
from worker_svc.model.operations import Operations
from worker_svc.model.torch_operations import TorchOperations

WINDOW, VOCABULARY = 7, 96


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, MistralForCausalLM]:
    torch.manual_seed(5)
    config = MistralConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        sliding_window=WINDOW,
        initializer_range=0.4,
    )
    model: MistralForCausalLM = MistralForCausalLM(config).eval()
    path = tmp_path_factory.mktemp("mistral")
    model.save_pretrained(path)
    return path, model


@pytest.mark.parametrize("operations", [TorchOperations, NativeOperations])
@pytest.mark.parametrize("depth", [1, 2])
def test_tokens_are_those_of_transformers_in_the_memory_of_a_window(
    mistral: tuple[Path, MistralForCausalLM], operations: type[Operations], depth: int
) -> None:
    path, model = mistral
    drawn = np.random.default_rng(0).integers(0, VOCABULARY, 100).tolist()
    # Not enough for one whole request, but for two windows and steps.
    pair = WiredPair(path, operations(), 12, depth)
    prompts = {"a": drawn[:40], "b": drawn[:21] + drawn[60:75], "c": drawn[50:53]}
    requests = [ask(name, prompt, 24) for name, prompt in prompts.items()]
    for request in requests:
        pair.scheduler.add(request, 0)
    pair.run()
    again = ask("again", [*prompts["a"], 3, 1], 8, n=2)
    pair.scheduler.add(again, 0)
    pair.run()
    for request in [*requests, *again.members]:
        prompt = request.tokens[: request.num_prompt_tokens].tolist()
        output = request.output_token_ids().tolist()
        assert output == oracle.greedy(model, prompt, len(output))
        assert len(output) == (8 if request.root is again else 24)
    assert pair.most_held <= KvGroup(window=WINDOW).most_blocks(128, BUDGET, BLOCK_SIZE)


def test_a_hit_needs_the_blocks_of_its_window_alone(
    mistral: tuple[Path, MistralForCausalLM],
) -> None:
    path, model = mistral
    prompt = np.random.default_rng(1).integers(0, VOCABULARY, 42).tolist()
    pair = WiredPair(path, TorchOperations(), 40, 2)
    for length, hit in ((40, 0), (42, 40)):
        pair.scheduler.add(request := ask("r", prompt[:length], 8), 0)
        pair.run()
        assert request.num_cached_tokens == hit
        assert request.output_token_ids().tolist() == oracle.greedy(model, prompt[:length], 8)


def test_the_window_is_short_enough_to_matter(mistral: tuple[Path, MistralForCausalLM]) -> None:
    path, model = mistral
    wide = MistralForCausalLM.from_pretrained(path, sliding_window=None, dtype=torch.float32)
    prompt = np.random.default_rng(1).integers(0, VOCABULARY, 42).tolist()
    assert oracle.greedy(wide, prompt, 8) != oracle.greedy(model, prompt, 8)
