"""Qwen3-MoE: a Qwen3 whose MLPs are mixtures of experts, but for a few layers."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from worker_svc.model.causal_model import CausalModel, place
from worker_svc.model.loader import Loader
from worker_svc.model.operations import Embedded, LayerCache, Linear, States


@dataclass(frozen=True, slots=True, eq=False)
class Qwen3MoeLayer:
    """The parameters of one layer."""

    attention_norm: torch.Tensor
    qkv: Linear
    """[E] to [(H + 2 * G) * D]: queries, keys, values."""

    head_norms: torch.Tensor
    """[H + G, D]: of queries, and of keys."""

    output: Linear
    mlp_norm: torch.Tensor
    mlp: Linear
    """[E] to [E]: a mixture of experts, or in a dense layer one MLP for all tokens."""

    # What other families have in a stack of layers.
    after_attention_norm: None = None
    after_mlp_norm: None = None


class Qwen3Moe(CausalModel):
    """See `CausalModel`."""

    __slots__ = ("_layers", "_stack")

    def __init__(self, loader: Loader) -> None:
        """Load all parameters. Raises: ModelError as `Loader` does."""
        super().__init__(loader)
        self._layers = loader.layers(_load_layer)
        self._stack = self._find_stack(self._layers)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: Sequence[LayerCache],
        slot_mappings: Sequence[torch.Tensor],
        block_tables: Sequence[torch.Tensor],
        seq_lens: torch.Tensor,
        query_start_loc: torch.Tensor,
        embedded: Embedded | None = None,
        read: torch.Tensor | None = None,
    ) -> States:
        """As `CausalModel.forward`."""
        operations, config = self._operations, self.config
        num_heads, head_dim, eps = config.num_heads, config.head_dim, config.rms_norm_eps
        columns = self._columns(positions, slot_mappings, block_tables, seq_lens, query_start_loc)
        hidden = place(self._embed(token_ids), embedded)  # [T, E]
        if self._stack is not None:
            return self._stack.run(hidden, columns, self._inverse_frequencies, kv_caches, read)
        attentions = self._attentions(columns, kv_caches)
        added: torch.Tensor | None = None
        for layer, attention, cache in zip(self._layers, attentions, kv_caches, strict=True):
            normed = self._norm(hidden, added, layer.attention_norm)
            qkv = layer.qkv(normed).view(len(token_ids), -1, head_dim)  # [T, H + 2 * G, D]
            operations.norm_heads(qkv, layer.head_norms, eps)
            mixed = attention.attend(qkv, num_heads, cache)  # [T, H, D]
            added = layer.output(mixed.view(-1, num_heads * head_dim))  # [T, E]
            normed = operations.rms_norm(added, layer.mlp_norm, eps, hidden)
            added = layer.mlp(normed)  # [T, E]
        return States(self._norm(hidden, added, self._last_norm))


def _load_layer(loader: Loader, name: str, number: int) -> Qwen3MoeLayer:
    hidden_size = loader.config.hidden_size
    return Qwen3MoeLayer(
        attention_norm=loader.norm(f"{name}.input_layernorm", hidden_size),
        qkv=loader.qkv(f"{name}.self_attn"),
        head_norms=loader.head_norms(f"{name}.self_attn"),
        output=loader.attention_output(f"{name}.self_attn"),
        mlp_norm=loader.norm(f"{name}.post_attention_layernorm", hidden_size),
        mlp=_load_mlp(loader, f"{name}.mlp", number),
    )


def _load_mlp(loader: Loader, name: str, number: int) -> Linear:
    experts = loader.config.experts
    if experts is None or number in experts.dense_layers:
        return loader.mlp(name)
    return loader.experts(name, gate="gate_proj", up="up_proj", down="down_proj")
