"""The Llama family, top to bottom: token ids to logits over a paged KV cache.

Shapes stand at the end of a line, in the letters of `kernels`; E is the hidden size, V the
vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from kernels import reference
from worker_svc.model.model_config import ModelConfig, RopeScaling

LayerCache = tuple[torch.Tensor, torch.Tensor]
"""One layer's keys and values, each [N, S, G, D]."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """The parameters of one layer. Matrices are [out, in], contiguous."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    """[(H + 2 * G) * D, E] Queries, keys, values."""

    qkv_bias: torch.Tensor | None
    output: torch.Tensor
    output_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    """[2 * intermediate, E] Gate, then up."""

    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class LlamaWeights:
    """The parameters of a model, all of one dtype on one device."""

    embedding: torch.Tensor
    """[V, E]"""

    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    lm_head: torch.Tensor
    """[V, E] The embedding itself, if the model ties them."""

    rope_divisors: torch.Tensor | None
    """[D / 2] fp32. What a GGUF file says to divide the rotary frequencies by."""


class Llama:
    """Runs flattened tokens of many requests through the model."""

    __slots__ = ("_inverse_frequencies", "_weights", "config")

    def __init__(self, config: ModelConfig, weights: LlamaWeights) -> None:
        self.config = config
        self._weights = weights
        frequencies = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        frequencies = frequencies.to(weights.embedding.device)
        if weights.rope_divisors is not None:
            frequencies = frequencies / weights.rope_divisors
        self._inverse_frequencies = frequencies

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, hidden states and KV cache."""
        return self._weights.embedding.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._weights.embedding.device

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: Sequence[LayerCache],
        slot_mapping: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        query_start_loc: torch.Tensor,
    ) -> torch.Tensor:
        """Return the normalised hidden state of each token, and write its keys and values.

        Shapes:
            token_ids, positions  [T]           int64
            kv_caches             per layer, [N, S, G, D] each, written in place
            slot_mapping          [T]           int64; -1 writes nothing
            block_tables, seq_lens, query_start_loc: as in `reference.paged_attention`
            returns               [T, E]        dtype of the weights

        Invariant: in each layer all tokens store before any attends, so a request may read a
            block that another one fills in this very step.
        """
        weights, config = self._weights, self.config
        hidden = functional.embedding(token_ids, weights.embedding)  # [T, E]
        cos, sin = self._rotations(positions)
        reads = reference.plan_reads(kv_caches[0][0], block_tables, seq_lens, query_start_loc)
        for layer, cache in zip(weights.layers, kv_caches, strict=True):
            normed = rms_norm(hidden, layer.attention_norm, config.rms_norm_eps)
            mixed = self._attend(layer, normed, cos, sin, cache, slot_mapping, reads)
            hidden = hidden + functional.linear(mixed, layer.output, layer.output_bias)
            normed = rms_norm(hidden, layer.mlp_norm, config.rms_norm_eps)
            gate_up = functional.linear(normed, layer.gate_up, layer.gate_up_bias)
            gate, up = gate_up.chunk(2, dim=-1)
            activated = functional.silu(gate) * up  # [T, intermediate]
            hidden = hidden + functional.linear(activated, layer.down, layer.down_bias)
        return rms_norm(hidden, weights.norm, config.rms_norm_eps)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return fp32 logits of hidden states. Shapes: hidden [S, E], returns [S, V]."""
        return functional.linear(hidden, self._weights.lm_head).float()

    def _attend(
        self,
        layer: LayerWeights,
        normed: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: LayerCache,
        slot_mapping: torch.Tensor,
        reads: reference.Reads,
    ) -> torch.Tensor:
        heads, kv_heads = self.config.num_heads, self.config.num_kv_heads
        head_dim = self.config.head_dim
        k_cache, v_cache = cache
        qkv = functional.linear(normed, layer.qkv, layer.qkv_bias)
        qkv = qkv.view(-1, heads + 2 * kv_heads, head_dim)  # [T, H + 2 * G, D]
        qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        # Rolling by half a head swaps its halves; `sin` holds the sign.
        qk = torch.addcmul(qk * cos, qk.roll(head_dim // 2, dims=-1), sin)
        q, k = qk[:, :heads], qk[:, heads:]
        reference.store_kv(k, v, k_cache, v_cache, slot_mapping)
        out = reference.attend(q, k_cache, v_cache, reads, head_dim**-0.5)  # [T, H, D]
        return out.view(-1, heads * head_dim)

    def _rotations(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and signed sines, [T, 1, D] in the run dtype."""
        angles = positions[:, None, None].float() * self._inverse_frequencies  # [T, 1, D / 2]
        cos, sin = angles.cos(), angles.sin()
        cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        return cos.to(self.dtype), sin.to(self.dtype)


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return hidden / rms(hidden) * weight.

    Shapes: hidden, returns [T, E]; weight [E].
    Numerics: in fp32, rounded once. transformers rounds to the run dtype before the weight
        multiplies, too; in float32 that is the same.
    """
    return functional.rms_norm(hidden, weight.shape, weight, eps)


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> torch.Tensor:
    """Return the angle per position of each pair of elements. Shape: [D / 2] fp32.

    Source: rotary embedding, Su et al. 2021 (arXiv:2104.09864), pairs (i, i + D / 2); `linear`
        and `llama3` as in transformers, `modeling_rope_utils.py`.
    """
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if scaling is None:
        return frequencies
    stretched = frequencies / scaling.factor
    if scaling.kind == "linear":
        return stretched
    # llama3: slow pairs are stretched, fast ones are not, and those between are blended.
    turns = scaling.original_max_position * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return keep * frequencies + (1.0 - keep) * stretched
