"""Gemma 3: windows in most layers, and norms in front of and behind every part of a layer.

In what it differs from a Llama: the embedding is scaled; five layers with a window follow one
another before each that sees all, and these two kinds turn their queries and keys at different
speeds; queries and keys are normalised head by head; attention and MLP are normalised a second
time, before they are added; the MLP's gate is a gelu; norms multiply by 1 + w (`norm_offset`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.activation import Activation
from worker_svc.model.causal_model import CausalModel, place
from worker_svc.model.loader import Loader
from worker_svc.model.operations import Embedded, LayerCache, Linear, Mlp, States


@dataclass(frozen=True, slots=True, eq=False)
class Gemma3Layer:
    """The parameters of one layer."""

    attention_norm: torch.Tensor
    qkv: Linear
    """[E] to [(H + 2 * G) * D]: queries, keys, values."""

    head_norms: torch.Tensor
    """[H + G, D]: of queries, and of keys."""

    output: Linear
    after_attention_norm: torch.Tensor
    mlp_norm: torch.Tensor
    mlp: Mlp
    """[E] to [E]: gelu(gate) * up of [intermediate], and down."""
    after_mlp_norm: torch.Tensor


class Gemma3(CausalModel):
    """See `CausalModel`."""

    __slots__ = ("_embedding_scale", "_layers", "_stack")

    def __init__(self, loader: Loader) -> None:
        """Load all parameters. Raises: ModelError as `Loader` does."""
        super().__init__(loader)
        # Rounded to the run dtype, as the model was trained.
        self._embedding_scale = torch.tensor(self.config.hidden_size**0.5).to(self._embedding)
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
        scaled = self._embed(token_ids) * self._embedding_scale  # [T, E]
        hidden = place(scaled, embedded)
        if self._stack is not None:
            return self._stack.run(hidden, columns, self._inverse_frequencies, kv_caches, read)
        attentions = self._attentions(columns, kv_caches)
        added: torch.Tensor | None = None
        for layer, attention, cache in zip(self._layers, attentions, kv_caches, strict=True):
            normed = self._norm(hidden, added, layer.attention_norm)
            qkv = layer.qkv(normed).view(len(token_ids), -1, head_dim)  # [T, H + 2 * G, D]
            operations.norm_heads(qkv, layer.head_norms, eps)
            mixed = attention.attend(qkv, num_heads, cache)  # [T, H, D]
            attended = layer.output(mixed.view(-1, num_heads * head_dim))  # [T, E]
            added = operations.rms_norm(attended, layer.after_attention_norm, eps)
            normed = operations.rms_norm(added, layer.mlp_norm, eps, hidden)
            out = layer.mlp(normed)  # [T, E]
            added = operations.rms_norm(out, layer.after_mlp_norm, eps)
        return States(self._norm(hidden, added, self._last_norm))


def _load_layer(loader: Loader, name: str, _number: int) -> Gemma3Layer:
    hidden_size = loader.config.hidden_size
    return Gemma3Layer(
        attention_norm=loader.norm(f"{name}.input_layernorm", hidden_size),
        qkv=loader.qkv(f"{name}.self_attn"),
        head_norms=loader.head_norms(f"{name}.self_attn"),
        output=loader.attention_output(f"{name}.self_attn"),
        after_attention_norm=loader.norm(f"{name}.post_attention_layernorm", hidden_size),
        mlp_norm=loader.norm(f"{name}.pre_feedforward_layernorm", hidden_size),
        mlp=loader.mlp(f"{name}.mlp", Activation.GELU),
        after_mlp_norm=loader.norm(f"{name}.post_feedforward_layernorm", hidden_size),
    )
