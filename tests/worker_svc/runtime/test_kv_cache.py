"""The cache has one block more than is usable, copies whole blocks, and takes memory when used."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from plan_driver import int32
from tiny_llama import write_tiny_llama
from worker_svc.errors import InvariantError
from worker_svc.model.checkpoint import read_model_config
from worker_svc.model.model_config import ModelConfig
from worker_svc.runtime.kv_cache import KVCache, block_bytes
from worker_svc.runtime.step_plan import BlockCopies

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    return read_model_config(write_tiny_llama(tmp_path))


@pytest.mark.parametrize("dtype", DTYPES)
def test_there_is_one_block_more_than_is_usable(config: ModelConfig, dtype: torch.dtype) -> None:
    cache = KVCache(config, 7, 4, dtype, CPU)
    assert len(cache.layers) == 2
    num_bytes = 0
    for layer in cache.layers:
        for tensor in layer[:2]:
            assert tensor.shape == (8, 4, 2, 16)
            assert tensor.dtype == dtype
            assert tensor.is_contiguous()
            assert not tensor.any()
            num_bytes += tensor.numel() * tensor.element_size()
    assert num_bytes == 8 * block_bytes(config, 4, dtype)


TOUCH = """
import sys
from dataclasses import replace
from pathlib import Path
import psutil, torch
from worker_svc.model.checkpoint import read_model_config
from worker_svc.runtime.kv_cache import KVCache, block_bytes

config = read_model_config(Path(sys.argv[1]))
process = psutil.Process()
before = process.memory_info().rss
num_blocks = (1 << 30) // block_bytes(config, 16, torch.float32)
cache = KVCache(config, num_blocks, 16, torch.float32, torch.device("cpu"))
made = process.memory_info().rss - before
cache.layers[0][0].fill_(1.0)
print(made, process.memory_info().rss - before)
"""


def test_memory_is_taken_when_it_is_touched(tmp_path: Path) -> None:
    """In a process of its own: what other tests hold and free would be counted too."""
    command = [sys.executable, "-c", TOUCH, str(write_tiny_llama(tmp_path))]
    made, touched = subprocess.check_output(command, text=True, timeout=60).split()
    assert int(made) < 1 << 26
    assert int(touched) > 1 << 27


def test_a_cache_in_lanes_takes_as_many_bytes(config: ModelConfig) -> None:
    cache = KVCache(config, 7, 32, torch.bfloat16, CPU, in_lanes=True)
    assert cache.layers[0].k.shape == (8, 2, 2, 8, 16, 2)
    assert cache.layers[0].v.shape == (8, 2, 32, 16)
    num_bytes = sum(tensor.nbytes for layer in cache.layers for tensor in layer[:2])
    assert num_bytes == 8 * block_bytes(config, 32, torch.bfloat16)
    assert KVCache(config, 7, 4, torch.bfloat16, CPU, in_lanes=True).layers[0].k.dim() == 4


@pytest.mark.parametrize("block_size", [4, 16])
def test_blocks_are_copied_in_every_layer(config: ModelConfig, block_size: int) -> None:
    cache = KVCache(config, 5, block_size, torch.float32, CPU, in_lanes=True)
    before = []
    for layer in cache.layers:
        for tensor in layer[:2]:
            tensor.normal_()
            before.append(tensor.clone())
    cache.copy_blocks(BlockCopies(int32(1, 1, 4), int32(2, 5, 3)))
    after = [tensor for layer in cache.layers for tensor in layer[:2]]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(new[[0, 1, 4]], old[[0, 1, 4]])
        assert torch.equal(new[[2, 5, 3]], old[[1, 1, 4]])


def test_layers_of_several_groups_share_memory_but_not_within_a_group(config: ModelConfig) -> None:
    hybrid = replace(config, num_layers=6, sliding_window=8, full_layers=frozenset({2, 5}))
    assert [group.layers for group in hybrid.kv_groups] == [(2, 5), (0, 1), (3, 4)]
    cache = KVCache(hybrid, 3, 4, torch.float32, CPU)
    places = [layer[0].data_ptr() for layer in cache.layers]
    assert places[2] == places[0] == places[3] != places[5] == places[1] == places[4]
    assert block_bytes(hybrid, 4, torch.float32) == block_bytes(config, 4, torch.float32)


@pytest.mark.parametrize(
    ("src", "dst"), [((1, 2), (3, 3)), ((1, 2), (2, 3)), ((0,), (1,)), ((1,), (6,)), ((1, 2), (3,))]
)
def test_copies_whose_order_would_matter_are_refused(
    config: ModelConfig, src: tuple[int, ...], dst: tuple[int, ...]
) -> None:
    cache = KVCache(config, 5, 4, torch.float32, CPU)
    with pytest.raises(InvariantError, match="are copied to"):
        cache.copy_blocks(BlockCopies(int32(*src), int32(*dst)))
