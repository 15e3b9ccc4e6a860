"""Every model family, from the core over both wires: batched, in chunks, preempted, shared."""

# mypy: allow-untyped-calls

from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedModel

import transformers_oracle as oracle
from scheduler_svc.core.request import Request
from tiny_families import FAMILIES, VOCAB, write_family
from wired_pair import BLOCK_SIZE, BUDGET, WiredPair, ask
from worker_svc.model.checkpoint import read_model_config
from worker_svc.model.native_operations import NativeOperations
from worker_svc.model.operations import Operations
from worker_svc.model.torch_operations import TorchOperations

DRAWN = np.random.default_rng(0).integers(0, VOCAB, 100).tolist()
PROMPTS = (DRAWN[:17], DRAWN[:9] + DRAWN[60:70], DRAWN[50:53])


def assert_as_alone(requests: list[Request], model: PreTrainedModel) -> None:
    for request in requests:
        prompt = request.tokens[: request.num_prompt_tokens].tolist()
        output = request.output_token_ids().tolist()
        assert output == oracle.greedy(model, prompt, len(output))


@pytest.mark.parametrize("operations", [TorchOperations, NativeOperations])
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_those_of_transformers_in_a_pool_too_small_for_all(
    name: str, operations: type[Operations], tmp_path: Path
) -> None:
    model = write_family(name, tmp_path, seed=3)
    groups = read_model_config(tmp_path).kv_groups
    longest = sum(group.most_blocks(64, BUDGET, BLOCK_SIZE) for group in groups)
    pair = WiredPair(tmp_path, operations(), longest * 5 // 4, depth=2)
    requests = [ask(str(place), prompt, 45) for place, prompt in enumerate(PROMPTS)]
    pair.serve(requests)
    assert_as_alone(requests, model)
    # Behind windows alone, what all hold at a time always fits.
    sees_all = any(group.window is None for group in groups)
    assert sees_all == any(request.num_preemptions for request in requests)


@pytest.mark.parametrize("operations", [TorchOperations, NativeOperations])
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_those_of_transformers_behind_a_hit_and_a_fork(
    name: str, operations: type[Operations], tmp_path: Path
) -> None:
    model = write_family(name, tmp_path, seed=4)
    pair = WiredPair(tmp_path, operations(), 300, depth=2)
    first = ask("first", DRAWN[:40], 20)
    pair.serve([first])
    again = ask("again", [*DRAWN[:40], 3, 1], 8, n=2)
    pair.serve([again])
    assert again.num_cached_tokens == 40
    assert_as_alone([first, *again.members], model)
