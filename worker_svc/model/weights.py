"""Files to parameters: reads, checks, fuses and places the weights of a Llama."""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from kernels.quantised_linear import QuantisedLinear
from worker_svc.errors import ModelError
from worker_svc.model.gguf_file import read_gguf
from worker_svc.model.gguf_weights import ROPE_DIVISORS, GgufWeights
from worker_svc.model.llama import LayerWeights, Llama, LlamaWeights
from worker_svc.model.model_config import ModelConfig, config_from_gguf, read_model_config
from worker_svc.model.operations import Linear, Operations
from worker_svc.model.safetensors_weights import SafetensorsWeights
from worker_svc.model.torch_operations import TorchOperations


class TensorSource(Protocol):
    """Tensors by their Hugging Face names."""

    @property
    def names(self) -> frozenset[str]:
        """The tensors there are."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """Return one of them."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model ready to run, and what it took to load it."""

    model: Llama
    weight_bytes: int
    load_seconds: float


def load_model(
    path: Path, dtype: torch.dtype, device: torch.device, operations: Operations | None = None
) -> LoadedModel:
    """Load a Hugging Face directory or a GGUF file, to run by `operations` (torch's, if not given).

    Raises: ModelError if the files are damaged, hold a model of another shape, or lack a tensor.
    """
    started = time.perf_counter()
    operations = operations or TorchOperations()
    config, source = _open_source(path)
    with source as tensors:
        loader = _Loader(tensors, config, dtype, device, operations)
        weights = loader.load()
    model = Llama(config, weights, operations)
    return LoadedModel(model, loader.weight_bytes, time.perf_counter() - started)


def _open_source(path: Path) -> tuple[ModelConfig, AbstractContextManager[TensorSource]]:
    if path.is_dir():
        return read_model_config(path), SafetensorsWeights(path)
    file = read_gguf(path)
    config = config_from_gguf(file)
    return config, GgufWeights(file, config)


class _Loader:
    """Takes tensors from a source, each once, and checks their shapes."""

    def __init__(
        self,
        source: TensorSource,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        operations: Operations,
    ) -> None:
        self._source = source
        self._left = set(source.names)
        self._config = config
        self._dtype = dtype
        self._device = device
        self._operations = operations
        self._weight_dtype = operations.weight_dtype or dtype
        self.weight_bytes = 0

    def load(self) -> LlamaWeights:
        """Return all parameters.

        Raises: ModelError if a tensor is missing, of another shape, or unknown: an unknown one
            would change the result, were it used.
        """
        config = self._config
        embedding = self._take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        layers = tuple(self._layer(f"model.layers.{i}") for i in range(config.num_layers))
        norm = self._take("model.norm.weight", config.hidden_size)
        if config.tie_word_embeddings:
            lm_head = self._again("model.embed_tokens.weight", embedding)
            self._left.discard("lm_head.weight")
        else:
            shape = (config.vocab_size, config.hidden_size)
            lm_head = self._place([self._read("lm_head.weight", shape)], self._weight_dtype)
        divisors = None
        if ROPE_DIVISORS in self._left:
            divisors = self._read(ROPE_DIVISORS, [config.head_dim // 2]).to(self._device)
        # Old files repeat the rotary frequencies in each layer.
        unknown = sorted(name for name in self._left if not name.endswith("rotary_emb.inv_freq"))
        if unknown:
            raise ModelError(f"{len(unknown)} tensors are not known, the first is {unknown[0]}")
        return LlamaWeights(embedding, layers, norm, self._packed(lm_head, None), divisors)

    def _layer(self, name: str) -> LayerWeights:
        config = self._config
        hidden, inner = config.hidden_size, config.intermediate_size
        queries = config.num_heads * config.head_dim
        keys = config.num_kv_heads * config.head_dim
        qkv = [
            (f"{name}.self_attn.q_proj", queries),
            (f"{name}.self_attn.k_proj", keys),
            (f"{name}.self_attn.v_proj", keys),
        ]
        output = [(f"{name}.self_attn.o_proj", hidden)]
        gate_up = [(f"{name}.mlp.gate_proj", inner), (f"{name}.mlp.up_proj", inner)]
        down = [(f"{name}.mlp.down_proj", hidden)]
        return LayerWeights(
            attention_norm=self._take(f"{name}.input_layernorm.weight", hidden),
            qkv=self._linear(qkv, hidden, has_bias=config.qkv_bias),
            output=self._linear(output, queries, has_bias=config.output_bias),
            mlp_norm=self._take(f"{name}.post_attention_layernorm.weight", hidden),
            gate_up=self._gated(gate_up, hidden, has_bias=config.mlp_bias),
            down=self._linear(down, inner, has_bias=config.mlp_bias),
        )

    def _linear(self, parts: Sequence[tuple[str, int]], columns: int, *, has_bias: bool) -> Linear:
        """Make one linear layer of matrices [rows, columns] above one another."""
        weight, bias = self._matrix(parts, columns, has_bias=has_bias)
        return self._packed(weight, bias)

    def _gated(self, parts: Sequence[tuple[str, int]], columns: int, *, has_bias: bool) -> Linear:
        """Make silu(gate) * up of two matrices above one another."""
        weight, bias = self._matrix(parts, columns, has_bias=has_bias)
        return self._counted(self._operations.gated_linear(weight, bias), weight)

    def _matrix(
        self, parts: Sequence[tuple[str, int]], columns: int, *, has_bias: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        tensors = [self._read(f"{name}.weight", (rows, columns)) for name, rows in parts]
        weight = self._place(tensors, self._weight_dtype)
        return weight, self._fuse(parts, "bias") if has_bias else None

    def _packed(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """Make a linear layer."""
        return self._counted(self._operations.linear(weight, bias), weight)

    def _counted(self, linear: Linear, weight: torch.Tensor) -> Linear:
        """Return a linear layer. One that says what it takes replaces what was counted."""
        if isinstance(linear, QuantisedLinear):
            self.weight_bytes += linear.num_bytes - weight.nbytes
        return linear

    def _again(self, name: str, placed: torch.Tensor) -> torch.Tensor:
        """Return a tensor that was read, in the type that linear layers want."""
        if self._weight_dtype == self._dtype:
            return placed
        return self._place([self._source.read(name)], self._weight_dtype)

    def _take(self, name: str, *shape: int) -> torch.Tensor:
        return self._place([self._read(name, shape)])

    def _fuse(
        self, parts: Sequence[tuple[str, int]], kind: str, columns: Sequence[int] = ()
    ) -> torch.Tensor:
        """Put tensors of one kind, each of the rows given, above one another."""
        return self._place([self._read(f"{name}.{kind}", (rows, *columns)) for name, rows in parts])

    def _read(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        if name not in self._left:
            raise ModelError(f"tensor {name} is missing")
        self._left.remove(name)
        tensor = self._source.read(name)
        if list(tensor.shape) != list(shape):
            raise ModelError(f"tensor {name} is {list(tensor.shape)}, must be {list(shape)}")
        return tensor

    def _place(
        self, tensors: Sequence[torch.Tensor], dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Copy into memory of our own: what was read may be a view of a file."""
        num_rows = sum(len(tensor) for tensor in tensors)
        shape = (num_rows, *tensors[0].shape[1:])
        target = torch.empty(shape, dtype=dtype or self._dtype, device=self._device)
        start = 0
        for tensor in tensors:
            target[start : start + len(tensor)].copy_(tensor)
            start += len(tensor)
        self.weight_bytes += target.numel() * target.element_size()
        return target
