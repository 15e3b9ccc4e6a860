"""A model's operations as Triton kernels, on a GPU: nothing here waits for the device."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional

from kernels.activation import Activation
from kernels.paged_decode import paged_decode
from kernels.paged_prefill import paged_prefill
from kernels.rms_norm import rms_norm
from kernels.rotary import Store, rotary
from kernels.silu_and_mul import silu_and_mul
from worker_svc.model.experts import Experts
from worker_svc.model.kept_linear import KeptLinear, kept_linear
from worker_svc.model.kept_values import NotKept
from worker_svc.model.model_config import ExpertsConfig
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
from worker_svc.model.quantised_config import Quantisation
from worker_svc.model.quantised_matrix import QuantisedMatrix
from worker_svc.model.torch_operations import TorchLinear, gelu_and_mul, norm_heads


class TritonOperations:
    """See `Operations`. Plain weights are multiplied by cuBLAS (or rocBLAS), through torch."""

    can_be_recorded = True
    keys_in_lanes = False
    adapts_gated = False

    @property
    def weight_dtype(self) -> torch.dtype | None:
        """The run dtype."""
        return None

    def embedding(self, table: torch.Tensor) -> Embedding:
        """As `Operations.embedding`."""
        return partial(functional.embedding, weight=table)

    def linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, is_head: bool = False
    ) -> Linear:
        """Keep the weight as it is."""
        return TorchLinear(weight, bias)

    def gated_linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation
    ) -> Linear:
        """Multiply by the weight as it is, then activate."""
        linear = TorchLinear(weight, bias)
        multiply = gelu_and_mul if activation is Activation.GELU else silu_and_mul
        return lambda x: multiply(linear(x))

    def experts(self, router: Linear, experts: Sequence[Mlp], config: ExpertsConfig) -> Linear:
        """Route in torch, which waits for the device to learn how many tokens an expert gets."""
        return Experts(router, experts, config)

    def keeps(self, known: Quantisation) -> bool:
        """Whatever is read."""
        return True

    def kept_linear(
        self,
        matrices: Sequence[QuantisedMatrix],
        known: Quantisation,
        bias: torch.Tensor | None,
        device: torch.device,
        gate: Activation | None = None,
    ) -> KeptLinear | NotKept:
        """Lay the values out for `quantised_matmul`."""
        return kept_linear(matrices, known, bias, device, gate)

    def stack(
        self,
        layers: Sequence[LayerParts],
        last_norm: torch.Tensor,
        lm_head: Linear,
        shape: StackShape,
    ) -> LayerStack | None:
        """None: a graph makes one launch of them, whatever they are."""
        return None

    def rms_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `Operations.rms_norm`."""
        return rms_norm(x, weight, eps, residual)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """As `Operations.silu_and_mul`."""
        return silu_and_mul(gate_up)

    def gelu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """As `Operations.gelu_and_mul`."""
        return gelu_and_mul(gate_up)

    def widen(self, logits: torch.Tensor) -> torch.Tensor:
        """As `Operations.widen`."""
        return logits.float()

    def norm_heads(self, qkv: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        """As `Operations.norm_heads`."""
        norm_heads(qkv, weight, eps)

    def begin(
        self, columns: StepColumns, inverse_frequencies: torch.Tensor, cache: LayerCache
    ) -> StepAttention:
        """Find each token's angles. Of the cache nothing is needed yet."""
        angles = columns.positions[:, None].float() * inverse_frequencies  # [T, D / 2]
        return _TritonAttention(columns, angles.cos(), angles.sin())


@dataclass(frozen=True, slots=True, eq=False)
class _TritonAttention:
    columns: StepColumns
    cos: torch.Tensor
    """[T, D / 2] fp32"""

    sin: torch.Tensor

    def attend(self, qkv: torch.Tensor, num_heads: int, cache: LayerCache) -> torch.Tensor:
        """As `StepAttention.attend`."""
        k_cache, v_cache, scales = cache
        num_kv_heads, head_dim = k_cache.shape[2:]
        columns = self.columns
        scale = columns.scale or head_dim**-0.5
        q, kv = qkv[:, :num_heads], qkv[:, num_heads:]
        k, v = kv[:, :num_kv_heads], kv[:, num_kv_heads:]
        rotary(q, k, self.cos, self.sin, Store(v, k_cache, v_cache, columns.slot_mapping, scales))
        num_tokens, num_requests = len(qkv), len(columns.seq_lens)
        if num_tokens == num_requests:
            return paged_decode(
                q,
                k_cache,
                v_cache,
                columns.block_tables,
                columns.seq_lens,
                scale,
                columns.block_tables.shape[1] * k_cache.shape[1],
                window=columns.window,
                scales=scales,
            )
        return paged_prefill(
            q,
            k_cache,
            v_cache,
            columns.block_tables,
            columns.seq_lens,
            columns.query_start_loc,
            scale,
            # Bounds, from shapes alone: lengths are on the device, and nobody waits for them.
            num_tokens - num_requests + 1,
            window=columns.window,
            scales=scales,
        )
