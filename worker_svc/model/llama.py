"""The Llama family, top to bottom: token ids to logits over a paged KV cache.

Shapes stand at the end of a line, in the letters of `kernels`; E is the hidden size, V the
vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from worker_svc.model.model_config import ModelConfig, RopeScaling
from worker_svc.model.operations import LayerCache, Linear, Operations, StackShape, StepColumns


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """The parameters of one layer."""

    attention_norm: torch.Tensor
    qkv: Linear
    """[E] to [(H + 2 * G) * D]: queries, keys, values."""

    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    """[E] to [intermediate]: silu(gate) * up."""

    down: Linear


@dataclass(frozen=True, slots=True, eq=False)
class LlamaWeights:
    """The parameters of a model, all of one dtype on one device."""

    embedding: torch.Tensor
    """[V, E]"""

    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    lm_head: Linear
    """[E] to [V]. Of the embedding itself, if the model ties them."""

    rope_divisors: torch.Tensor | None
    """[D / 2] fp32. What a GGUF file says to divide the rotary frequencies by."""


class Llama:
    """Runs flattened tokens of many requests through the model."""

    __slots__ = ("_inverse_frequencies", "_operations", "_stack", "_weights", "config")

    def __init__(self, config: ModelConfig, weights: LlamaWeights, operations: Operations) -> None:
        """Take weights whose linear layers are made by the same `operations`."""
        self.config = config
        self._weights = weights
        self._operations = operations
        frequencies = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        frequencies = frequencies.to(weights.embedding.device)
        if weights.rope_divisors is not None:
            frequencies = frequencies / weights.rope_divisors
        self._inverse_frequencies = frequencies
        shape = StackShape(
            config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps
        )
        self._stack = operations.stack(weights.layers, weights.norm, shape)

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
            block_tables, seq_lens, query_start_loc: as in `StepColumns`
            returns               [T, E]        dtype of the weights

        Invariant: in each layer all tokens store before any attends, so a request may read a
            block that another one fills in this very step.
        """
        weights, operations, config = self._weights, self._operations, self.config
        num_heads, head_dim, eps = config.num_heads, config.head_dim, config.rms_norm_eps
        columns = StepColumns(
            positions,
            slot_mapping,
            block_tables,
            seq_lens,
            query_start_loc,
            config.sliding_window,
        )
        hidden = functional.embedding(token_ids, weights.embedding)  # [T, E]
        if self._stack is not None:
            return self._stack.run(hidden, columns, self._inverse_frequencies, kv_caches)
        attention = operations.begin(columns, self._inverse_frequencies, kv_caches[0])
        added: torch.Tensor | None = None
        for layer, cache in zip(weights.layers, kv_caches, strict=True):
            normed = self._norm(hidden, added, layer.attention_norm)
            qkv = layer.qkv(normed).view(len(token_ids), -1, head_dim)  # [T, H + 2 * G, D]
            mixed = attention.attend(qkv, num_heads, cache)  # [T, H, D]
            added = layer.output(mixed.view(-1, num_heads * head_dim))  # [T, E]
            normed = operations.rms_norm(added, layer.mlp_norm, eps, hidden)
            added = layer.down(layer.gate_up(normed))  # [T, E]
        return self._norm(hidden, added, weights.norm)

    def _norm(
        self, hidden: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor
    ) -> torch.Tensor:
        """Add what the layer before has to add, if there is one, and normalise."""
        eps = self.config.rms_norm_eps
        if added is None:
            return self._operations.rms_norm(hidden, weight, eps)
        return self._operations.rms_norm(added, weight, eps, hidden)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return fp32 logits of hidden states. Shapes: hidden [S, E], returns [S, V]."""
        return self._weights.lm_head(hidden).float()


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
