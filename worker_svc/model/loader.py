"""Tensors to parameters: reads each once, checks it, fuses what belongs together, places it."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

from kernels.checks import Scales
from worker_svc.errors import InvariantError, ModelError
from worker_svc.model.experts import Expert, Experts
from worker_svc.model.gguf_weights import ROPE_DIVISORS
from worker_svc.model.kv_scales import read_kv_scales
from worker_svc.model.model_config import ModelConfig
from worker_svc.model.operations import Linear, Operations

LayerT = TypeVar("LayerT")


class TensorSource(Protocol):
    """Tensors by their Hugging Face names."""

    @property
    def names(self) -> frozenset[str]:
        """The tensors there are."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """Return one of them."""
        ...


class Loader:
    """Takes tensors from a source, each once, and checks their shapes.

    The linear layers that all families name alike have a method each; what a family has of its
    own it takes by name. All of them raise ModelError if a tensor is missing or of another shape.
    """

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
        self.config = config
        self._dtype = dtype
        self._device = device
        self.operations = operations
        self.weight_bytes = 0

    def layers(self, load: Callable[["Loader", str, int], LayerT]) -> tuple[LayerT, ...]:
        """Return all layers; `load` loads the one of a name and number."""
        return tuple(
            load(self, f"model.layers.{number}", number) for number in range(self.config.num_layers)
        )

    def kv_scales(self) -> tuple[Scales, ...] | None:
        """Return the scales of fp8 keys and values, layer by layer; None if there are none."""
        config = self.config
        scales, known = read_kv_scales(
            self._left, self._source.read, config.num_layers, config.num_kv_heads, self._device
        )
        self._left -= known
        return scales

    def finish(self) -> None:
        """Raise ModelError if a tensor was not taken: it would change the result, were it used."""
        # Old files repeat the rotary frequencies in each layer.
        unknown = sorted(name for name in self._left if not name.endswith("rotary_emb.inv_freq"))
        if unknown:
            raise ModelError(f"{len(unknown)} tensors are not known, the first is {unknown[0]}")

    def lm_head(self, embedding: torch.Tensor) -> Linear:
        """Return the head, which some models share with the embedding."""
        config = self.config
        if config.tie_word_embeddings:
            self._left.discard("lm_head.weight")
            return self.operations.linear(embedding, None)
        head = self.take("lm_head.weight", config.vocab_size, config.hidden_size)
        return self.operations.linear(head, None)

    def rope_divisors(self) -> torch.Tensor:
        """Return what a GGUF file says to divide the rotary frequencies by. [D / 2] fp32."""
        num_pairs = self.config.head_dim // 2
        if ROPE_DIVISORS in self._left:
            return self._read(ROPE_DIVISORS, [num_pairs])
        return torch.ones(num_pairs)

    def norm(self, name: str, size: int) -> torch.Tensor:
        """Return what a norm multiplies by."""
        weight = self._read(f"{name}.weight", [size])
        if self.config.norm_offset:
            weight = weight.float() + self.config.norm_offset
        return self._place([weight])

    def head_norms(self, name: str) -> torch.Tensor:
        """Return what the norms of queries and keys multiply by. Shape: [H + G, D]."""
        config = self.config
        queries = self.norm(f"{name}.q_norm", config.head_dim)
        keys = self.norm(f"{name}.k_norm", config.head_dim)
        return torch.stack([queries] * config.num_heads + [keys] * config.num_kv_heads)

    def qkv(self, name: str) -> Linear:
        """Return queries, keys and values of an attention as one linear layer."""
        config = self.config
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        parts = [(f"{name}.q_proj", queries), (f"{name}.k_proj", keys), (f"{name}.v_proj", keys)]
        return self.linear(parts, config.hidden_size, has_bias=config.qkv_bias)

    def attention_output(self, name: str) -> Linear:
        """Return what brings attention back to hidden states."""
        config = self.config
        parts = [(f"{name}.o_proj", config.hidden_size)]
        return self.linear(parts, config.num_heads * config.head_dim, has_bias=config.output_bias)

    def gate_up(self, name: str) -> Linear:
        """Return gate and up projection of an MLP as one linear layer."""
        config, inner = self.config, self.config.intermediate_size
        parts = [(f"{name}.gate_proj", inner), (f"{name}.up_proj", inner)]
        return self.linear(parts, config.hidden_size, has_bias=config.mlp_bias)

    def down(self, name: str) -> Linear:
        """Return what brings an MLP back to hidden states."""
        config, parts = self.config, [(f"{name}.down_proj", self.config.hidden_size)]
        return self.linear(parts, config.intermediate_size, has_bias=config.mlp_bias)

    def experts(self, name: str, gate: str, up: str, down: str) -> Experts:
        """Return a router and its experts, whose three projections have these names.

        Raises: InvariantError if the config has no experts.
        """
        config = self.config
        if config.experts is None:
            raise InvariantError(f"{config.architecture} has no experts")
        hidden, inner = config.hidden_size, config.experts.intermediate_size
        router = self.linear([(f"{name}.gate", config.experts.num_experts)], hidden, has_bias=False)
        mlps = []
        for number in range(config.experts.num_experts):
            expert = f"{name}.experts.{number}"
            parts = [(f"{expert}.{gate}", inner), (f"{expert}.{up}", inner)]
            gate_up = self.linear(parts, hidden, has_bias=False)
            back = self.linear([(f"{expert}.{down}", hidden)], inner, has_bias=False)
            mlps.append(Expert(gate_up, back))
        return Experts(router, mlps, config.experts, self.operations)

    def linear(self, parts: Sequence[tuple[str, int]], columns: int, *, has_bias: bool) -> Linear:
        """Make one linear layer of matrices [rows, columns] above one another."""
        weight = self._fuse(parts, "weight", [columns])
        return self.operations.linear(weight, self._fuse(parts, "bias") if has_bias else None)

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """Return one tensor as it is, in our dtype on our device."""
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

    def _place(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Copy into memory of our own: what was read may be a view of a file."""
        num_rows = sum(len(tensor) for tensor in tensors)
        shape = (num_rows, *tensors[0].shape[1:])
        target = torch.empty(shape, dtype=self._dtype, device=self._device)
        start = 0
        for tensor in tensors:
            target[start : start + len(tensor)].copy_(tensor)
            start += len(tensor)
        self.weight_bytes += target.numel() * target.element_size()
        return target
