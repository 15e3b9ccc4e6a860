"""Tensors to parameters: reads each once, checks it, fuses what belongs together, places it."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeAlias, TypeVar

import torch
from torch.nn import functional

from kernels.activation import Activation
from kernels.checks import Scales
from kernels.quantised_linear import QuantisedLinear
from worker_svc.errors import InvariantError, ModelError
from worker_svc.model.adapters import AdapterBank
from worker_svc.model.gguf_names import ROPE_DIVISORS
from worker_svc.model.kept_values import KeepsValues, Kept, KeptValues, NotKept
from worker_svc.model.kv_scales import read_kv_scales
from worker_svc.model.model_config import ModelConfig
from worker_svc.model.operations import Linear, Mlp, Operations
from worker_svc.model.other_ranks import GatheredHead, NoOtherRanks, OtherRanks, SummedLinear
from worker_svc.model.shard import Extent
from worker_svc.model.torch_adapted import Gated

Size: TypeAlias = int | Extent
"""Of a dimension: all of it, or a part."""

LayerT = TypeVar("LayerT")

Progress: TypeAlias = Callable[[int, int], None]
"""Is told how many tensors of how many have been read."""


class TensorSource(Protocol):
    """Tensors by their Hugging Face names."""

    @property
    def names(self) -> frozenset[str]:
        """The tensors there are."""
        ...

    def shape(self, name: str) -> list[int]:
        """Return the shape of one of them."""
        ...

    def read(self, name: str, dtype: torch.dtype, *parts: range) -> torch.Tensor:
        """Return one of them, or a part of its first dimensions.

        In `dtype` or, where that costs nothing, as it is.
        """
        ...


class Loader:
    """Takes tensors from a source, each once, and checks their shapes.

    The linear layers that all families name alike have a method each; what a family has of its
    own it takes by name. All of them raise ModelError if a tensor is missing or of another shape.

    Where there are other ranks, those methods take this rank's part, and what they return
    exchanges with the others where it must. `config` is the part's, as if it were a model; a
    family need not know.
    """

    def __init__(
        self,
        source: TensorSource,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        operations: Operations,
        ranks: OtherRanks | None = None,
        progress: Progress | None = None,
        adapters: AdapterBank | None = None,
    ) -> None:
        """Take the part of one of several ranks, if there are others.

        Raises: ConfigError if there are more than can have a part.
        """
        self._source = source
        self._left = set(source.names)
        self._num_tensors = len(self._left)
        self._progress = progress
        self._ranks = ranks or NoOtherRanks()
        shard = self._shard = self._ranks.shard
        heads = shard.heads(config)
        self._queries = Extent(config.num_heads, heads.queries).times(config.head_dim)
        self._keys = Extent(config.num_kv_heads, heads.keys).times(config.head_dim)
        self._whole = config
        self.config = shard.part_of(config)
        self._dtype = dtype
        self._device = device
        self.operations = operations
        self._adapters = adapters
        self._weight_dtype = operations.weight_dtype or dtype
        self.weight_bytes = 0
        self._num_kept = self._kept_weights = self._kept_bytes = 0
        self._refused: Counter[str] = Counter()

    @property
    def kept(self) -> Kept:
        """What has been kept so far."""
        return Kept(self._num_kept, self._kept_weights, self._kept_bytes, dict(self._refused))

    def layers(self, load: Callable[["Loader", str, int], LayerT]) -> tuple[LayerT, ...]:
        """Return all layers; `load` loads the one of a name and number."""
        return tuple(
            load(self, f"model.layers.{number}", number) for number in range(self.config.num_layers)
        )

    def kv_scales(self) -> tuple[Scales, ...] | None:
        """Return the scales of fp8 keys and values, layer by layer; None if there are none."""
        whole, mine = self._whole, self._shard.heads(self._whole).keys
        scales, known = read_kv_scales(
            self._left,
            lambda name: self._source.read(name, torch.float32),
            whole.num_layers,
            whole.num_kv_heads,
            self._device,
        )
        self._left -= known
        if scales is None:
            return None
        heads = slice(mine.start, mine.stop)
        return tuple(Scales(one.k[heads].clone(), one.v[heads].clone()) for one in scales)

    def finish(self) -> None:
        """Raise ModelError if a tensor was not taken: it would change the result, were it used."""
        unknown = sorted(name for name in self._left if not self._changes_nothing(name))
        if unknown:
            raise ModelError(f"{len(unknown)} tensors are not known, the first is {unknown[0]}")

    def _changes_nothing(self, name: str) -> bool:
        """Return whether a tensor is known to be there for nothing."""
        # Old files repeat the rotary frequencies in each layer; GPTQ's have biases of 0 everywhere.
        if name.endswith(".bias"):
            return not self._source.read(name, torch.float32).any()
        return name.endswith("rotary_emb.inv_freq")

    def lm_head(self, embedding: torch.Tensor) -> Linear:
        """Return the head, which some models share with the embedding."""
        config, shard = self.config, self._shard
        mine = shard.vocab(config.vocab_size)
        if config.tie_word_embeddings:
            self._left.discard("lm_head.weight")
            weight = self._head_of(embedding, mine)
        else:
            shape = (mine, config.hidden_size)
            tensor = self._read("lm_head.weight", shape, self._weight_dtype)
            weight = self._place([tensor], self._weight_dtype)
        if shard.is_whole:
            return self._packed(weight, None, is_head=True)
        # Logits are gathered in parts of one size.
        missing = shard.vocab_width(config.vocab_size) - len(weight)
        padded = functional.pad(weight, (0, 0, 0, missing))
        head = self._packed(padded, None, is_head=True)
        return GatheredHead(head, self._ranks, config.vocab_size)

    def _head_of(self, embedding: torch.Tensor, mine: Extent) -> torch.Tensor:
        """Return this rank's part of an embedding that is the head, too."""
        rows = mine.mine
        if self._weight_dtype == self._dtype:
            return embedding[rows.start : rows.stop]
        tensor = self._source.read("model.embed_tokens.weight", self._weight_dtype, rows)
        return self._place([tensor], self._weight_dtype)

    def rope_divisors(self) -> torch.Tensor:
        """Return what a GGUF file says to divide the rotary frequencies by. [D / 2] fp32."""
        num_pairs = self.config.head_dim // 2
        if ROPE_DIVISORS in self._left:
            return self._read(ROPE_DIVISORS, [num_pairs], torch.float32)
        return torch.ones(num_pairs)

    def norm(self, name: str, size: int) -> torch.Tensor:
        """Return what a norm multiplies by."""
        weight = self._read(f"{name}.weight", [size], torch.float32)
        return self._place([weight.float() + self.config.norm_offset])

    def head_norms(self, name: str) -> torch.Tensor:
        """Return what the norms of queries and keys multiply by. Shape: [H + G, D]."""
        config = self.config
        queries = self.norm(f"{name}.q_norm", config.head_dim)
        keys = self.norm(f"{name}.k_norm", config.head_dim)
        return torch.stack([queries] * config.num_heads + [keys] * config.num_kv_heads)

    def qkv(self, name: str) -> Linear:
        """Return queries, keys and values of an attention as one linear layer."""
        parts = [
            (f"{name}.q_proj", self._queries),
            (f"{name}.k_proj", self._keys),
            (f"{name}.v_proj", self._keys),
        ]
        return self.linear(parts, self.config.hidden_size, has_bias=self.config.qkv_bias)

    def attention_output(self, name: str) -> Linear:
        """Return what brings attention back to hidden states."""
        parts = [(f"{name}.o_proj", self.config.hidden_size)]
        return self._summed(parts, self._queries, has_bias=self.config.output_bias)

    def gated(self, name: str, activation: Activation = Activation.SILU) -> Linear:
        """Return activation(gate) * up of an MLP as one layer, [E] to [intermediate]."""
        config, inner = self.config, self._shard.columns(self._whole.intermediate_size)
        parts = [(f"{name}.gate_proj", inner), (f"{name}.up_proj", inner)]
        if self._adapters is not None and not self.operations.adapts_gated:
            # They change gate and up before these are multiplied.
            gate_up = self.linear(parts, config.hidden_size, has_bias=config.mlp_bias)
            return Gated(gate_up, self.operations, activation)
        gated = self._plain_gated(parts, config.hidden_size, activation, has_bias=config.mlp_bias)
        return self._adapted(gated, parts, config.hidden_size)

    def down(self, name: str) -> Linear:
        """Return what brings an MLP back to hidden states."""
        inner = self._shard.columns(self._whole.intermediate_size)
        parts = [(f"{name}.down_proj", self.config.hidden_size)]
        return self._summed(parts, inner, has_bias=self.config.mlp_bias)

    def mlp(self, name: str, activation: Activation = Activation.SILU) -> Mlp:
        """Return a gated MLP."""
        return Mlp(self.gated(name, activation), self.down(name))

    def experts(self, name: str, gate: str, up: str, down: str) -> Linear:
        """Return a router and its experts, whose three projections have these names.

        Raises: InvariantError if the config has no experts.
        """
        config = self.config
        if config.experts is None:
            raise InvariantError(f"{config.architecture} has no experts")
        hidden, inner = config.hidden_size, self._shard.columns(config.experts.intermediate_size)
        # An expert sees some tokens only, so adapters change none of this.
        linear = partial(self._plain_linear, has_bias=False)
        router = linear([(f"{name}.gate", config.experts.num_experts)], hidden)
        mlps = []
        for number in range(config.experts.num_experts):
            expert = f"{name}.experts.{number}"
            parts = [(f"{expert}.{gate}", inner), (f"{expert}.{up}", inner)]
            gate_up = self._plain_gated(parts, hidden, Activation.SILU, has_bias=False)
            back = linear([(f"{expert}.{down}", hidden)], inner)
            mlps.append(Mlp(gate_up, back))
        mixture = self.operations.experts(router, mlps, config.experts)
        # Of each expert a rank has some columns.
        return mixture if self._shard.is_whole else SummedLinear(mixture, self._ranks)

    def linear(self, parts: Sequence[tuple[str, Size]], columns: Size, *, has_bias: bool) -> Linear:
        """Make one linear layer of matrices [rows, columns] above one another.

        Adapters may change it: each call must see all tokens of a step, in order.
        """
        linear = self._plain_linear(parts, columns, has_bias=has_bias)
        return self._adapted(linear, parts, columns)

    def _adapted(self, linear: Linear, parts: Sequence[tuple[str, Size]], columns: Size) -> Linear:
        """Return the layer as adapters may change it, if there are any."""
        if self._adapters is None:
            return linear
        extents = [(name, _extent(rows)) for name, rows in parts]
        return self._adapters.wrap(linear, extents, _extent(columns))

    def _plain_linear(
        self, parts: Sequence[tuple[str, Size]], columns: Size, *, has_bias: bool
    ) -> Linear:
        bias = self._biases(parts) if has_bias else None
        kept = self._kept(parts, columns, bias)
        return self._packed(self._weight(parts, columns), bias) if kept is None else kept

    def _plain_gated(
        self,
        parts: Sequence[tuple[str, Size]],
        columns: Size,
        activation: Activation,
        *,
        has_bias: bool,
    ) -> Linear:
        bias = self._biases(parts) if has_bias else None
        if (kept := self._kept(parts, columns, bias, activation)) is not None:
            return kept
        weight = self._weight(parts, columns)
        return self._counted(self.operations.gated_linear(weight, bias, activation), weight)

    def _kept(
        self,
        parts: Sequence[tuple[str, Size]],
        columns: Size,
        bias: torch.Tensor | None,
        gate: Activation | None = None,
    ) -> Linear | None:
        """Make one linear layer of values as a file has them; None if they are read as plain."""
        source, operations = self._source, self.operations
        if not (isinstance(source, KeptValues) and isinstance(operations, KeepsValues)):
            return None
        names = [f"{name}.weight" for name, _ in parts]
        found = [source.quantisation_of(name) for name in names]
        if (known := found[0]) is None or None in found or not operations.keeps(known):
            return None
        matrices = [
            source.matrix(name, *self._find(name, (rows, columns)))
            for name, (_, rows) in zip(names, parts, strict=True)
        ]
        linear = operations.kept_linear(matrices, known, bias, self._device, gate)
        if isinstance(linear, NotKept):
            self._refused[linear.reason] += len(matrices)
            return None
        for name in names:
            self._taken(name)
        self._num_kept += len(matrices)
        self._kept_weights += sum(matrix.values.numel() for matrix in matrices)
        self._kept_bytes += linear.num_bytes
        self.weight_bytes += linear.num_bytes
        return linear

    def _weight(self, parts: Sequence[tuple[str, Size]], columns: Size) -> torch.Tensor:
        """Return matrices above one another."""
        dtype = self._weight_dtype
        tensors = [self._read(f"{name}.weight", (rows, columns), dtype) for name, rows in parts]
        return self._place(tensors, dtype)

    def _packed(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, is_head: bool = False
    ) -> Linear:
        return self._counted(self.operations.linear(weight, bias, is_head=is_head), weight)

    def _counted(self, linear: Linear, weight: torch.Tensor) -> Linear:
        """Count what a linear layer takes, if it says so, in place of its weight."""
        if isinstance(linear, QuantisedLinear):
            self.weight_bytes += linear.num_bytes - weight.nbytes
        return linear

    def _summed(
        self, parts: Sequence[tuple[str, Size]], columns: Extent, *, has_bias: bool
    ) -> Linear:
        """Make a linear layer each rank has some columns of. Rank 0 adds the bias, for all."""
        if self._shard.is_whole:
            return self.linear(parts, columns, has_bias=has_bias)
        if has_bias and not self._shard.leads:
            self._left -= {f"{name}.bias" for name, _ in parts}
        part = self.linear(parts, columns, has_bias=has_bias and self._shard.leads)
        return SummedLinear(part, self._ranks)

    def take(self, name: str, *shape: Size) -> torch.Tensor:
        """Return one tensor as it is, or this rank's part, in our dtype on our device."""
        return self._place([self._read(name, shape)])

    def _biases(self, parts: Sequence[tuple[str, Size]]) -> torch.Tensor:
        """Put biases, each of the rows given, above one another."""
        return self._place([self._read(f"{name}.bias", (rows,)) for name, rows in parts])

    def _read(
        self, name: str, shape: Sequence[Size], dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        parts = self._find(name, shape)
        tensor = self._source.read(name, dtype or self._dtype, *parts)
        if not tensor.is_floating_point():
            raise ModelError(f"tensor {name} is {tensor.dtype}, must be of floats")
        self._taken(name)
        return tensor

    def _find(self, name: str, shape: Sequence[Size]) -> tuple[range, ...]:
        """Return what of a tensor is wanted, once it is known to be there; nothing if all is."""
        if name not in self._left:
            raise ModelError(f"tensor {name} is missing")
        extents = [_extent(size) for size in shape]
        found, wanted = self._source.shape(name), [extent.whole for extent in extents]
        if found != wanted:
            raise ModelError(f"tensor {name} is {found}, must be {wanted}")
        whole = all(extent.is_whole for extent in extents)
        return () if whole else tuple(extent.mine for extent in extents)

    def _taken(self, name: str) -> None:
        self._left.remove(name)
        if self._progress is not None:
            self._progress(self._num_tensors - len(self._left), self._num_tensors)

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


def _extent(size: Size) -> Extent:
    return Extent.full(size) if isinstance(size, int) else size
