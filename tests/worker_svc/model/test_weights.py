"""Weights are loaded whole and in their places, or refused by a name."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tiny_llama import HEADS, KV_HEADS, tiny_weights, write_tiny_llama
from worker_svc.errors import ModelError
from worker_svc.model.llama import Llama
from worker_svc.model.operations import Linear
from worker_svc.model.safetensors_weights import SafetensorsWeights
from worker_svc.model.torch_operations import TorchGatedLinear, TorchLinear
from worker_svc.model.weights import load_model

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


def matrix(linear: Linear) -> torch.Tensor:
    if isinstance(linear, TorchGatedLinear):
        linear = linear.linear
    assert isinstance(linear, TorchLinear)
    return linear.weight


def load_llama(path: Path) -> Llama:
    model = load_model(path, torch.float32, CPU).model
    assert isinstance(model, Llama)
    return model


def write_shards(directory: Path, tensors: Tensors) -> None:
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in shards.items():
        save_file({name: tensors[name] for name in members}, directory / file)
    weight_map = {name: file for file, members in shards.items() for name in members}
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def test_projections_are_fused_in_order(tmp_path: Path) -> None:
    weights = load_llama(write_tiny_llama(tmp_path))
    expected = tiny_weights(0)
    layer, name = weights._layers[1], "model.layers.1"
    rows = [HEADS * 16, KV_HEADS * 16, KV_HEADS * 16]
    for part, piece in zip("qkv", torch.split(matrix(layer.qkv), rows), strict=True):
        assert torch.equal(piece, expected[f"{name}.self_attn.{part}_proj.weight"])
    for part, piece in zip(("gate", "up"), torch.chunk(matrix(layer.mlp.gate_up), 2), strict=True):
        assert torch.equal(piece, expected[f"{name}.mlp.{part}_proj.weight"])


def test_weights_are_counted_and_cast(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    num_elements = sum(tensor.numel() for tensor in tiny_weights(0).values())
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        loaded = load_model(tmp_path, dtype, CPU)
        assert loaded.weight_bytes == num_elements * dtype.itemsize
        assert loaded.model.dtype == dtype
        assert loaded.load_seconds > 0


def test_shards_give_the_same_model_as_one_file(tmp_path: Path) -> None:
    one = load_llama(write_tiny_llama(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    write_shards(tmp_path, tiny_weights(0))
    many = load_llama(tmp_path)
    assert torch.equal(matrix(one._lm_head), matrix(many._lm_head))
    for left, right in zip(one._layers, many._layers, strict=True):
        assert torch.equal(matrix(left.qkv), matrix(right.qkv))
        assert torch.equal(matrix(left.mlp.down), matrix(right.mlp.down))


def drop(tensors: Tensors) -> None:
    del tensors["model.layers.1.mlp.up_proj.weight"]


def reshape(tensors: Tensors) -> None:
    tensors["model.norm.weight"] = torch.ones(63)


def add(tensors: Tensors) -> None:
    tensors["model.layers.0.self_attn.q_proj.weight_scale"] = torch.ones(1)


def count(tensors: Tensors) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.int8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (count, r"tensor model.layers.1.mlp.up_proj.weight is torch.int8, must be of floats"),
        (drop, r"tensor model.layers.1.mlp.up_proj.weight is missing"),
        (reshape, r"tensor model.norm.weight is \[63\], must be \[64\]"),
        (add, r"1 tensors are not known, the first is .*q_proj.weight_scale"),
    ],
)
def test_a_wrong_tensor_is_named(
    change: Callable[[Tensors], None], message: str, tmp_path: Path
) -> None:
    write_tiny_llama(tmp_path)
    tensors = tiny_weights(0)
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        load_model(tmp_path, torch.float32, CPU)


def test_rotary_frequencies_of_old_files_are_passed_over(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    tensors = tiny_weights(0)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, tmp_path / "model.safetensors")
    load_model(tmp_path, torch.float32, CPU)


def test_files_that_are_damaged_or_not_there_are_named(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    weights, index = tmp_path / "model.safetensors", tmp_path / "model.safetensors.index.json"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelError, match="cannot be read"):
        load_model(tmp_path, torch.float32, CPU)
    weights.unlink()
    with pytest.raises(ModelError, match="holds neither"):
        load_model(tmp_path, torch.float32, CPU)
    for text, message in (
        ("{}", "is damaged"),
        ("[", "is damaged"),
        ("[" * 100_000, "is damaged"),
        ('{"weight_map": {"a": "../secret"}}', "not a file beside it"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "cannot be read"),
    ):
        index.write_text(text)
        with pytest.raises(ModelError, match=message):
            load_model(tmp_path, torch.float32, CPU)


def test_a_part_is_read_from_its_file_alone(tmp_path: Path) -> None:
    write_shards(tmp_path, tensors := tiny_weights(0))
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"any": "a.safetensors", "other": "b.safetensors"}})
    )
    name = "model.layers.1.mlp.down_proj.weight"
    with SafetensorsWeights(tmp_path) as weights:
        assert weights.shape(name) == list(tensors[name].shape)
        assert torch.equal(weights.read(name, torch.float32, range(3, 9)), tensors[name][3:9])
        assert torch.equal(
            weights.read(name, torch.float32, range(64), range(5, 20)), tensors[name][:, 5:20]
        )
