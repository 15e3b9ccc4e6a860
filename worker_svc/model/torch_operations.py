"""A model's operations in plain torch: on any device, and where there is no native code."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional

from kernels import reference
from kernels.activation import Activation
from kernels.checks import FP8
from worker_svc.model.experts import Experts
from worker_svc.model.model_config import ExpertsConfig
from worker_svc.model.operations import (
    Embedding,
    LayerCache,
    LayerParts,
    Linear,
    Mlp,
    StackShape,
    StepAttention,
    StepColumns,
)


@dataclass(frozen=True, slots=True, eq=False)
class TorchLinear:
    """x @ weight.T + bias."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product. Shapes: x [T, in], returns [T, out]."""
        return functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True, eq=False)
class TorchGatedLinear:
    """activation(gate) * up, of [gate, up] = x @ weight.T + bias."""

    linear: TorchLinear
    activation: Activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product. Shapes: x [T, in], returns [T, I]."""
        is_gelu = self.activation is Activation.GELU
        return (gelu_and_mul if is_gelu else silu_and_mul)(self.linear(x))


class TorchOperations:
    """See `Operations`."""

    can_be_recorded = False
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
        """As `Operations.gated_linear`."""
        return TorchGatedLinear(TorchLinear(weight, bias), activation)

    def experts(self, router: Linear, experts: Sequence[Mlp], config: ExpertsConfig) -> Linear:
        """As `Operations.experts`."""
        return Experts(router, experts, config)

    def stack(
        self,
        _layers: Sequence[LayerParts],
        _last_norm: torch.Tensor,
        _lm_head: Linear,
        _shape: StackShape,
    ) -> None:
        """Each layer by itself."""

    def rms_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `Operations.rms_norm`."""
        if residual is not None:
            x = residual.add_(x)
        return functional.rms_norm(x, weight.shape, weight, eps)

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
        """Find what each request reads, and each token's angles."""
        angles = columns.positions[:, None, None].float() * inverse_frequencies  # [T, 1, D / 2]
        cos, sin = angles.cos(), angles.sin()
        cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        # Of fp8 the run dtype cannot be told: it is known where the queries are.
        dtype = torch.float32 if cache.k.dtype in FP8 else cache.k.dtype
        return _TorchAttention(
            reference.plan_reads(
                cache.k,
                columns.block_tables,
                columns.seq_lens,
                columns.query_start_loc,
                columns.window,
            ),
            columns.slot_mapping,
            cos.to(dtype),
            sin.to(dtype),
            columns.scale or cache[0].shape[-1] ** -0.5,
        )


@dataclass(frozen=True, slots=True, eq=False)
class _TorchAttention:
    reads: reference.Reads
    slot_mapping: torch.Tensor
    cos: torch.Tensor
    """[T, 1, D] in the run dtype, or fp32."""

    sin: torch.Tensor
    """As cos, with the sign of the half."""

    scale: float

    def attend(self, qkv: torch.Tensor, num_heads: int, cache: LayerCache) -> torch.Tensor:
        """As `StepAttention.attend`."""
        k_cache, v_cache, scales = cache
        num_kv_heads, head_dim = k_cache.shape[2:]
        qk, v = qkv[:, :-num_kv_heads], qkv[:, -num_kv_heads:]
        # Rolling by half a head swaps its halves; `sin` holds the sign.
        cos, sin = self.cos.to(qk.dtype), self.sin.to(qk.dtype)
        qk = torch.addcmul(qk * cos, qk.roll(head_dim // 2, dims=-1), sin)
        q, k = qk[:, :num_heads], qk[:, num_heads:]
        reference.store_kv(k, v, k_cache, v_cache, self.slot_mapping, scales)
        return reference.attend(q, k_cache, v_cache, self.reads, self.scale, scales=scales)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """As `Operations.silu_and_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def gelu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """As `Operations.gelu_and_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh").mul_(up)


def norm_heads(qkv: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """As `Operations.norm_heads`."""
    heads = qkv[:, : len(weight)]
    heads.copy_(functional.rms_norm(heads.float(), heads.shape[-1:], None, eps) * weight)
