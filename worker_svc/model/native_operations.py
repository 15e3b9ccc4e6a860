"""A model's operations in native code, on a CPU: `kernels.cpu_attention` and its neighbours."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels import cache_layout, cpu_layers
from kernels.activation import Activation
from kernels.checks import Store
from kernels.cpu_attention import attend
from kernels.cpu_build import native_code
from kernels.cpu_embedding import CpuEmbedding
from kernels.packed_linear import PackedLinear
from kernels.weight_memory import WeightMemory
from worker_svc.model.model_config import ExpertsConfig
from worker_svc.model.native_experts import native_experts
from worker_svc.model.native_stack import native_stack
from worker_svc.model.operations import (
    Embedding,
    LayerCache,
    LayerParts,
    LayerStack,
    Linear,
    Mlp,
    StackShape,
    StepAttention,
    StepColumns,
)


class NativeOperations:
    """See `Operations`."""

    can_be_recorded = False
    keys_in_lanes = True
    __slots__ = ("_memory",)

    def __init__(self) -> None:
        self._memory = WeightMemory()

    @property
    def adapts_gated(self) -> bool:
        """They can if there is native code."""
        return native_code() is not None

    @property
    def weight_dtype(self) -> torch.dtype | None:
        """The run dtype."""
        return None

    def embedding(self, table: torch.Tensor) -> Embedding:
        """As `Operations.embedding`."""
        return CpuEmbedding(table)

    def linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, is_head: bool = False
    ) -> Linear:
        """Lay the weight out for the processor's products, in a copy."""
        return PackedLinear(weight, bias, memory=self._memory)

    def gated_linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation
    ) -> Linear:
        """As `linear`, of both matrices together."""
        return PackedLinear(weight, bias, gate=activation, memory=self._memory)

    def experts(self, router: Linear, experts: Sequence[Mlp], config: ExpertsConfig) -> Linear:
        """As `Operations.experts`."""
        return native_experts(router, experts, config)

    def stack(
        self,
        layers: Sequence[LayerParts],
        last_norm: torch.Tensor,
        lm_head: Linear,
        shape: StackShape,
    ) -> LayerStack | None:
        """As `Operations.stack`."""
        return native_stack(layers, last_norm, lm_head, shape)

    def rms_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `Operations.rms_norm`."""
        return cpu_layers.rms_norm(x, weight, eps, residual)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """As `Operations.silu_and_mul`."""
        return cpu_layers.silu_and_mul(gate_up)

    def gelu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """As `Operations.gelu_and_mul`."""
        return cpu_layers.gelu_and_mul(gate_up)

    def widen(self, logits: torch.Tensor) -> torch.Tensor:
        """As `Operations.widen`."""
        return cpu_layers.widen(logits.contiguous())

    def norm_heads(self, qkv: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        """As `Operations.norm_heads`."""
        cpu_layers.norm_heads(qkv[:, : len(weight)], weight, eps)

    def begin(
        self, columns: StepColumns, inverse_frequencies: torch.Tensor, cache: LayerCache
    ) -> StepAttention:
        """Find each token's angles. Of the cache nothing is needed yet."""
        return _NativeAttention(columns, *cpu_layers.turns(columns.positions, inverse_frequencies))


@dataclass(frozen=True, slots=True, eq=False)
class _NativeAttention:
    columns: StepColumns
    cos: torch.Tensor
    """[T, D / 2] fp32"""

    sin: torch.Tensor

    def attend(self, qkv: torch.Tensor, num_heads: int, cache: LayerCache) -> torch.Tensor:
        """As `StepAttention.attend`."""
        k_cache, v_cache, scales = cache
        _, _, num_kv_heads, head_dim = cache_layout.sizes(k_cache)
        columns = self.columns
        q, kv = qkv[:, :num_heads], qkv[:, num_heads:]
        k, v = kv[:, :num_kv_heads], kv[:, num_kv_heads:]
        store = Store(v, k_cache, v_cache, columns.slot_mapping, scales)
        cpu_layers.rotary(q, k, self.cos, self.sin, store)
        return attend(
            q,
            k_cache,
            v_cache,
            columns.block_tables,
            columns.seq_lens,
            columns.query_start_loc,
            columns.scale or head_dim**-0.5,
            window=columns.window,
            scales=scales,
        )
