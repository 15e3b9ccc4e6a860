"""A model that nobody runs is refused for what it is, not for the first thing its files lack."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest

from scheduler_svc.errors import ConfigError
from scheduler_svc.service.text.model_facts import ModelFacts
from scheduler_svc.service.text.served_architectures import (
    GGUF_ARCHITECTURES,
    HF_ARCHITECTURES,
    blaming_the_architecture,
)
from scheduler_svc.service.text.tokenizer import Tokenizer
from worker_svc.model.gguf_config import KNOWN_GGUF_ARCHITECTURES
from worker_svc.model.model_config import KNOWN_HF_ARCHITECTURES


def refusal(path: Path) -> str:
    def read() -> None:
        ModelFacts.from_path(path)
        Tokenizer.from_path(path)

    with pytest.raises(ConfigError) as caught, blaming_the_architecture(path):
        read()
    return str(caught.value)


def directory(folder: Path, **config: object) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def gguf_file(path: Path, architecture: str) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tensor("token_embd.weight", np.zeros((7, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gpt2", "n_positions": 1024, "vocab_size": 50257},
        {"model_type": "mamba", "vocab_size": 50280},
        {"vocab_size": "many"},
        {},
        {"model_type": "gpt2", "max_position_embeddings": 8, "vocab_size": 9},
    ],
)
def test_a_thin_config_of_an_unknown_architecture_is_refused_for_that(
    tmp_path: Path, config: dict[str, object]
) -> None:
    told = refusal(directory(tmp_path, architectures=["StrangeForCausalLM"], **config))
    assert told.startswith(f"{tmp_path}: architectures is StrangeForCausalLM, which is not suppor")
    assert all(name in told for name in HF_ARCHITECTURES)
    assert told.count("\n") == 0


def test_a_gguf_file_of_an_unknown_architecture_is_refused_for_that(tmp_path: Path) -> None:
    path = gguf_file(tmp_path / "model.gguf", "mamba")
    told = refusal(path)
    assert told.startswith(f"{path}: general.architecture is mamba, which is not supported; known")
    assert "mamba.context_length is missing" in told


def test_a_known_architecture_is_refused_for_what_it_lacks(tmp_path: Path) -> None:
    told = refusal(directory(tmp_path, architectures=["LlamaForCausalLM"], model_type="llama"))
    assert told == f"{tmp_path / 'config.json'}: max_position_embeddings is missing"
    path = gguf_file(tmp_path / "model.gguf", "llama")
    assert refusal(path) == f"{path}: llama.context_length is missing"


@pytest.mark.parametrize("content", ["{", "[]", '{"architectures": 5}', "{}"])
def test_what_names_no_architecture_is_refused_as_it_was(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    assert "which is not supported" not in refusal(tmp_path)


def test_the_names_are_those_that_workers_know() -> None:
    assert tuple(KNOWN_HF_ARCHITECTURES) == HF_ARCHITECTURES
    assert tuple(KNOWN_GGUF_ARCHITECTURES) == GGUF_ARCHITECTURES
