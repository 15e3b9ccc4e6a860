"""A fingerprint is the same for copies of a model, and differs for any other."""

import json
import shutil
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file

from gguf_writer import write_tiny_gguf
from tiny_llama import tiny_weights, write_tiny_llama
from worker_svc.errors import ModelError
from worker_svc.model.fingerprint import model_fingerprint


def test_copies_have_the_same_fingerprint(tmp_path: Path) -> None:
    first = write_tiny_llama(tmp_path / "first")
    second = shutil.copytree(first, tmp_path / "second")
    assert model_fingerprint(first) == model_fingerprint(second)
    assert len(bytes.fromhex(model_fingerprint(first))) == 32


def test_other_weights_of_the_same_shape_have_another(tmp_path: Path) -> None:
    found = {
        model_fingerprint(write_tiny_llama(tmp_path / "0")),
        model_fingerprint(write_tiny_llama(tmp_path / "1", seed=1)),
        model_fingerprint(write_tiny_llama(tmp_path / "2", max_position_embeddings=100)),
        model_fingerprint(write_tiny_gguf(tmp_path / "0.gguf")),
        model_fingerprint(write_tiny_gguf(tmp_path / "1.gguf", seed=1)),
        model_fingerprint(write_tiny_gguf(tmp_path / "2.gguf", metadata={"general.name": "x"})),
    }
    assert len(found) == 6


def test_a_fine_tune_of_one_matrix_has_another(tmp_path: Path) -> None:
    directory = write_tiny_llama(tmp_path)
    before = model_fingerprint(directory)
    tensors = tiny_weights(0)
    tensors["model.layers.1.mlp.down_proj.weight"] += 1e-3 * torch.randn(64, 128)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    assert model_fingerprint(directory) != before


def test_the_tokenizer_does_not_matter(tmp_path: Path) -> None:
    directory = write_tiny_llama(tmp_path)
    before = model_fingerprint(directory)
    (directory / "tokenizer_config.json").unlink()
    assert model_fingerprint(directory) == before


def test_it_reads_little_of_a_file(demo_gguf: Path) -> None:
    counters = psutil.Process().io_counters
    before = counters().read_chars
    model_fingerprint(demo_gguf)
    # The samples, what Python's buffers read around them, and the header.
    assert counters().read_chars - before < 8 << 20 < demo_gguf.stat().st_size // 4


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        model_fingerprint(tmp_path)
    directory = write_tiny_llama(tmp_path)
    (directory / "model.safetensors").write_bytes(b"\xff" * 8)
    with pytest.raises(ModelError, match="damaged"):
        model_fingerprint(directory)


def test_a_shard_that_is_missing_is_named(tmp_path: Path) -> None:
    directory = write_tiny_llama(tmp_path)
    (directory / "model.safetensors").rename(directory / "model-00001-of-00002.safetensors")
    names = [f"model-{number:05}-of-00002.safetensors" for number in (1, 2)]
    index = {"weight_map": dict(enumerate(names))}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"^model-00002-of-00002.safetensors cannot be read: No s"):
        model_fingerprint(directory)
