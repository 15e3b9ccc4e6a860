"""What lies at a path: a model's config, and its tensors by name."""

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from worker_svc.errors import ModelError
from worker_svc.model.gguf_config import config_from_gguf
from worker_svc.model.gguf_file import read_gguf
from worker_svc.model.gguf_weights import GgufWeights
from worker_svc.model.loader import TensorSource
from worker_svc.model.model_config import ModelConfig, config_from_hf
from worker_svc.model.safetensors_weights import SafetensorsWeights


def read_model_config(path: Path) -> ModelConfig:
    """Read the config of a Hugging Face directory or a GGUF file.

    Raises: ModelError if the files are damaged, or hold a model of another shape.
    """
    if path.is_dir():
        return config_from_hf(_read_json(path / "config.json"))
    return config_from_gguf(read_gguf(path))


def open_checkpoint(path: Path) -> tuple[ModelConfig, AbstractContextManager[TensorSource]]:
    """Return the config, and the tensors.

    Raises: ModelError as `read_model_config` does, or if the tensors cannot be read.
    """
    if path.is_dir():
        return read_model_config(path), SafetensorsWeights(path)
    file = read_gguf(path)
    config = config_from_gguf(file)
    return config, GgufWeights(file, config)


def _read_json(path: Path) -> Mapping[str, object]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path.name} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path.name} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path.name} is not a JSON object")
    return values
