"""Ranks with a part of a model each compute together what the whole model computes."""

from pathlib import Path

import pytest
import torch

from paged_logits import CPU, all_logits
from thread_ranks import on_all_ranks
from tiny_families import FAMILIES, VOCAB, write_family
from worker_svc.model.native_operations import NativeOperations
from worker_svc.model.operations import Operations
from worker_svc.model.torch_operations import TorchOperations
from worker_svc.model.weights import load_model
from worker_svc.service.process_group import ProcessGroup

PROMPT = [(7 * i * i + 3) % VOCAB for i in range(40)]


def parallel_logits(path: Path, world_size: int, operations: type[Operations]) -> torch.Tensor:
    """Return rank 0's logits of PROMPT, in two chunks."""

    def run(group: ProcessGroup) -> torch.Tensor:
        model = load_model(path, torch.float32, CPU, operations(), group).model
        return all_logits(model, PROMPT, 23)

    return on_all_ranks(world_size, run)[0]


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_the_whole_model(name: str, world_size: int, tmp_path: Path) -> None:
    """With 4 query heads on 2 key/value heads: 3 and 4 ranks hold some of these twice."""
    write_family(name, tmp_path)
    whole = all_logits(load_model(tmp_path, torch.float32, CPU, TorchOperations()).model, PROMPT)
    found = parallel_logits(tmp_path, world_size, TorchOperations)
    torch.testing.assert_close(found, whole, atol=1e-4, rtol=1e-3)
    assert torch.equal(found.argmax(-1), whole.argmax(-1))


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3 with biases", "gemma3", "mixtral"])
def test_native_layers_take_uneven_parts(name: str, tmp_path: Path) -> None:
    write_family(name, tmp_path)
    whole = all_logits(load_model(tmp_path, torch.float32, CPU, NativeOperations()).model, PROMPT)
    found = parallel_logits(tmp_path, 3, NativeOperations)
    torch.testing.assert_close(found, whole, atol=1e-4, rtol=1e-3)


def test_parts_are_read_and_held_once_but_for_embedding_and_norms(tmp_path: Path) -> None:
    write_family("llama", tmp_path)
    whole = load_model(tmp_path, torch.float32, CPU)
    embedding = 4 * VOCAB * 48
    held = on_all_ranks(
        2, lambda group: load_model(tmp_path, torch.float32, CPU, ranks=group).weight_bytes
    )
    norms = 4 * 48 * (2 * 3 + 1)
    assert sum(held) == whole.weight_bytes + embedding + norms
