"""What a model is made of, for one kind of device: an interface, since there are several."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import torch

from kernels.activation import Activation
from kernels.checks import Scales
from worker_svc.model.model_config import ExpertsConfig


class LayerCache(NamedTuple):
    """One layer's keys and values."""

    k: torch.Tensor
    """[N, S, G, D] in the run dtype, or in fp8."""

    v: torch.Tensor
    """As k."""

    scales: Scales | None = None
    """What fp8 values are multiplied by when read. None: 1, or the cache is not fp8."""


Linear: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""A linear layer. Shapes: [T, in] to [T, out]."""


Embedding: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Token ids to their vectors. Shapes: [T] int64 to [T, E]."""


@dataclass(frozen=True, slots=True, eq=False)
class Mlp:
    """A gated MLP, as a linear layer [E] to [E]."""

    gate_up: Linear
    """[E] to [I]: activation(gate) * up."""

    down: Linear
    """[I] to [E]."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the MLP adds. Shapes: x, returns [T, E]."""
        return self.down(self.gate_up(x))


@dataclass(frozen=True, slots=True, eq=False)
class StepColumns:
    """Where a step's tokens stand, and what they may read: the same in all layers of a KV group."""

    positions: torch.Tensor
    """[T] int64"""

    slot_mapping: torch.Tensor
    """[T] int64; -1 writes nothing."""

    block_tables: torch.Tensor
    """[R, B] int32. What lies before the window of a request's first new token is not read."""

    seq_lens: torch.Tensor
    """[R] int32, the new tokens included."""

    query_start_loc: torch.Tensor
    """[R + 1] int32, from 0 to T, rising by at least 1."""

    window: int | None = None
    """Tokens a token sees, itself included. None: all before it."""

    scale: float | None = None
    """Multiplies dot products of queries and keys. None: D ** -0.5."""


class Embedded(NamedTuple):
    """Tokens of a step that have vectors of their own, whatever their ids."""

    places: torch.Tensor
    """[P] int64. Places in the step."""

    vectors: torch.Tensor
    """[P, E]"""


class StepAttention(Protocol):
    """Attention of one step's tokens."""

    def attend(self, qkv: torch.Tensor, num_heads: int, cache: LayerCache) -> torch.Tensor:
        """Rotate, store all tokens' keys and values, and only then attend.

        Shapes: qkv [T, H + 2 * G, D], may be overwritten; returns [T, H, D].
        """
        ...


class LayerParts(Protocol):
    """The parameters of one layer of the Llama shape, and what some families have besides."""

    @property
    def attention_norm(self) -> torch.Tensor:
        """[E]."""
        ...

    @property
    def qkv(self) -> Linear:
        """[E] to [(H + 2 * G) * D]: queries, keys, values."""
        ...

    @property
    def output(self) -> Linear:
        """[H * D] to [E]."""
        ...

    @property
    def mlp_norm(self) -> torch.Tensor:
        """[E]."""
        ...

    @property
    def mlp(self) -> Linear:
        """[E] to [E]: an `Mlp`, or a mixture of experts."""
        ...

    @property
    def head_norms(self) -> torch.Tensor | None:
        """[H + G, D]: of queries and keys, as `Operations.norm_heads` has them."""
        ...

    @property
    def after_attention_norm(self) -> torch.Tensor | None:
        """[E]: of what attention gives, before it is added."""
        ...

    @property
    def after_mlp_norm(self) -> torch.Tensor | None:
        """[E]: of what the MLP gives, before it is added."""
        ...


@dataclass(frozen=True, slots=True)
class StackShape:
    """What the layers of a stack have in common."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    """Of the norms."""

    groups: tuple[int, ...]
    """The number of each layer's KV group."""


class States(NamedTuple):
    """What a model computes of a step's tokens."""

    hidden: torch.Tensor
    """[T, E], normalised, in the dtype of the weights."""

    logits: torch.Tensor | None = None
    """[P, V] fp32, of the tokens read, if they were found on the way."""


class LayerStack(Protocol):
    """All layers of a model at once."""

    def run(
        self,
        hidden: torch.Tensor,
        columns: Sequence[StepColumns],
        inverse_frequencies: Sequence[torch.Tensor],
        caches: Sequence[LayerCache],
        read: torch.Tensor | None = None,
    ) -> States:
        """Return what `CausalModel.forward` does, and write keys and values.

        Shapes: hidden [T, E], overwritten; columns and inverse_frequencies [D / 2]: of each KV
            group; read as in `CausalModel.forward`.
        """
        ...


class Operations(Protocol):
    """The operations of a model, all in the run dtype."""

    can_be_recorded: bool
    """Whether a step can be recorded as a graph: nothing waits for the device, and no shape
    depends on what a tensor holds."""

    keys_in_lanes: bool
    """Whether a cache is in lanes where its blocks allow it (`kernels.cache_layout`)."""

    @property
    def adapts_gated(self) -> bool:
        """Whether adapters can change what `gated_linear` returns."""
        ...

    @property
    def weight_dtype(self) -> torch.dtype | None:
        """In what type `linear` wants its weight. None: in the run dtype, as its bias."""
        ...

    def embedding(self, table: torch.Tensor) -> Embedding:
        """Return what finds tokens' rows in a table [V, E]."""
        ...

    def linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, is_head: bool = False
    ) -> Linear:
        """Return a linear layer, or the LM head. The caller drops the weight, [out, in]."""
        ...

    def gated_linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation
    ) -> Linear:
        """Return activation(gate) * up of a linear layer whose rows are those of gate, then of up.

        Shapes: weight [2 * I, in], bias [2 * I]; the layer's [T, in] to [T, I].
        """
        ...

    def experts(self, router: Linear, experts: Sequence[Mlp], config: ExpertsConfig) -> Linear:
        """Return the weighted sum of the MLPs that a router chooses for each token, [E] to [E].

        Numerics: probabilities, and the sum over experts, in fp32.
        """
        ...

    def stack(
        self,
        layers: Sequence[LayerParts],
        last_norm: torch.Tensor,
        lm_head: Linear,
        shape: StackShape,
    ) -> LayerStack | None:
        """Return the layers and what is behind them as one, if that is faster than one by one."""
        ...

    def rms_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return x / rms(x) * weight; with a residual, of residual + x, which is written to it.

        Shapes: x, residual, returns [T, E]; weight [E].
        Numerics: in fp32, rounded once. transformers rounds to the run dtype before the weight
            multiplies, too; in float32 that is the same.
        """
        ...

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) * up. Shapes: gate_up [T, 2 * I], returns [T, I]."""
        ...

    def gelu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return gelu(gate) * up, gelu by its approximation with tanh. Shapes: as silu_and_mul.

        Source: Hendrycks and Gimpel 2016 (arXiv:1606.08415).
        """
        ...

    def widen(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the LM head's result in fp32, exactly. Shape: [S, V]."""
        ...

    def norm_heads(self, qkv: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        """Normalise queries and keys in place, each head as `rms_norm` does; values stay.

        Shapes: qkv [T, H + 2 * G, D]; weight [H + G, D].
        """
        ...

    def begin(
        self, columns: StepColumns, inverse_frequencies: torch.Tensor, cache: LayerCache
    ) -> StepAttention:
        """Return the attention of a step. Of `cache`, only shape and dtype matter."""
        ...
