"""What lies at a path: a model's config, and its tensors by name."""

import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from worker_svc.errors import ModelError
from worker_svc.model.gguf_config import config_from_gguf
from worker_svc.model.gguf_file import read_gguf
from worker_svc.model.gguf_weights import GgufWeights
from worker_svc.model.loader import TensorSource
from worker_svc.model.model_config import ModelConfig, config_from_hf
from worker_svc.model.quantised_config import Quantisation, quantisation_from_hf
from worker_svc.model.quantised_weights import QuantisedWeights
from worker_svc.model.safetensors_weights import SafetensorsWeights


def read_model_config(path: Path) -> ModelConfig:
    """Read the config of a Hugging Face directory or a GGUF file.

    Raises: ModelError if the files are damaged, or hold a model of another shape, or weights that
        are quantised in a way that is not known.
    """
    if path.is_dir():
        values = _read_json(path / "config.json")
        quantisation_from_hf(values)
        return config_from_hf(values)
    return config_from_gguf(read_gguf(path))


def open_checkpoint(path: Path) -> tuple[ModelConfig, AbstractContextManager[TensorSource]]:
    """Return the config, and the tensors.

    Raises: ModelError as `read_model_config` does, or if the tensors cannot be read.
    """
    if path.is_dir():
        config = read_model_config(path)
        quantisation = quantisation_from_hf(_read_json(path / "config.json"))
        if quantisation is None:
            return config, SafetensorsWeights(path)
        return config, _open_quantised(path, quantisation)
    file = read_gguf(path)
    config = config_from_gguf(file)
    return config, GgufWeights(file, config)


@contextmanager
def _open_quantised(path: Path, quantisation: Quantisation) -> Iterator[TensorSource]:
    with SafetensorsWeights(path) as tensors:
        yield QuantisedWeights(tensors, quantisation)


def _read_json(path: Path) -> Mapping[str, object]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path.name} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path.name} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path.name} is not a JSON object")
    return values
