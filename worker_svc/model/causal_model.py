"""What all model families share: an embedding in front, a head behind, attention through blocks.

A family is one file beside this: what a layer holds, how it is loaded, and `forward` from top to
bottom. Shapes stand at the end of a line, in the letters of `kernels`; E is the hidden size, V
the vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from worker_svc.model.layer_groups import LayerGroup
from worker_svc.model.loader import Loader
from worker_svc.model.model_config import ModelConfig
from worker_svc.model.operations import (
    Embedded,
    LayerCache,
    LayerParts,
    LayerStack,
    StackShape,
    States,
    StepAttention,
    StepColumns,
)
from worker_svc.model.rope import inverse_frequencies


class CausalModel(ABC):
    """Runs flattened tokens of many requests through a model."""

    __slots__ = (
        "_embed",
        "_embedding",
        "_groups",
        "_inverse_frequencies",
        "_last_norm",
        "_lm_head",
        "_operations",
        "config",
    )

    def __init__(self, loader: Loader) -> None:
        """Load what stands around the layers. Raises: ModelError as `Loader` does."""
        config = self.config = loader.config
        self._operations = loader.operations
        self._embedding = loader.take(
            "model.embed_tokens.weight", config.vocab_size, config.hidden_size
        )
        self._embed = self._operations.embedding(self._embedding)
        self._last_norm = loader.norm("model.norm", config.hidden_size)
        self._lm_head = loader.lm_head(self._embedding)
        self._groups = config.kv_groups
        self._inverse_frequencies = _frequencies_of_groups(
            config, self._groups, loader.rope_divisors(), self.device
        )

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, hidden states and KV cache."""
        return self._embedding.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._embedding.device

    @property
    def can_be_recorded(self) -> bool:
        """Whether `forward` and `logits` can be recorded as a graph. See `Operations`."""
        # How many tokens an expert gets depends on the tokens.
        return self._operations.can_be_recorded and self.config.experts is None

    @property
    def keys_in_lanes(self) -> bool:
        """How it wants its cache. See `Operations`."""
        return self._operations.keys_in_lanes

    @abstractmethod
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
        """Return the normalised hidden state of each token, and write its keys and values.

        What is returned for tokens that are not among those `read` may be undefined: behind the
        last layer's attention nobody needs them. Of those read the logits come along, if they are
        cheaper so. All holds until the next call, which may overwrite it.

        Shapes:
            token_ids, positions  [T]           int64
            kv_caches             per layer, [N, S, G, D] each, written in place
            slot_mappings         per KV group, [T] int64; -1 writes nothing
            block_tables          per KV group, as in `StepColumns`
            seq_lens, query_start_loc: as in `StepColumns`
            embedded              what some tokens have in place of the table's rows
            read                  [P]           int64, ascending; None: all tokens

        Invariant: in each layer all tokens store before any attends, so a request may read a
            block that another one fills in this very step.
        """

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return fp32 logits of hidden states. Shapes: hidden [S, E], returns [S, V]."""
        return self._operations.widen(self._lm_head(hidden))

    @torch.inference_mode()
    def narrow_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the same numbers in the dtype of the weights, which takes less memory."""
        return self._lm_head(hidden)

    def _columns(
        self,
        positions: torch.Tensor,
        slot_mappings: Sequence[torch.Tensor],
        block_tables: Sequence[torch.Tensor],
        seq_lens: torch.Tensor,
        query_start_loc: torch.Tensor,
    ) -> list[StepColumns]:
        """Return the columns of a step, for each KV group."""
        return [
            StepColumns(
                positions,
                slot_mapping,
                tables,
                seq_lens,
                query_start_loc,
                group.window,
                self.config.attention_scale,
            )
            for group, slot_mapping, tables in zip(
                self._groups, slot_mappings, block_tables, strict=True
            )
        ]

    def _attentions(
        self, columns: Sequence[StepColumns], kv_caches: Sequence[LayerCache]
    ) -> list[StepAttention]:
        """Return each layer's attention in a step; layers of a KV group share one."""
        by_layer: dict[int, StepAttention] = {}
        for of_group, frequencies, group in zip(
            columns, self._inverse_frequencies, self._groups, strict=True
        ):
            attention = self._operations.begin(of_group, frequencies, kv_caches[group.layers[0]])
            by_layer |= dict.fromkeys(group.layers, attention)
        return [by_layer[layer] for layer in range(len(kv_caches))]

    def _find_stack(self, layers: Sequence[LayerParts]) -> LayerStack | None:
        """Return all layers as one, where there is such a thing."""
        config = self.config
        group_of = {layer: n for n, group in enumerate(self._groups) for layer in group.layers}
        shape = StackShape(
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.rms_norm_eps,
            tuple(group_of[layer] for layer in range(len(layers))),
        )
        return self._operations.stack(layers, self._last_norm, self._lm_head, shape)

    def _norm(
        self, hidden: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor
    ) -> torch.Tensor:
        """Add what the layer before has to add, if there is one, and normalise."""
        eps = self.config.rms_norm_eps
        if added is None:
            return self._operations.rms_norm(hidden, weight, eps)
        return self._operations.rms_norm(added, weight, eps, hidden)


def place(hidden: torch.Tensor, embedded: Embedded | None) -> torch.Tensor:
    """Return what the layers begin with: hidden states, but for those that were given. [T, E]."""
    return hidden if embedded is None else hidden.index_copy_(0, *embedded)


def _frequencies_of_groups(
    config: ModelConfig,
    groups: Sequence[LayerGroup],
    divisors: torch.Tensor,
    device: torch.device,
) -> tuple[torch.Tensor, ...]:
    """Return the rotary frequencies of each KV group's layers. Shape: [D / 2] fp32 each."""
    full = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling) / divisors
    local = full
    if config.local_rope_theta is not None:
        local = inverse_frequencies(config.head_dim, config.local_rope_theta, None)
    return tuple((full if group.window is None else local).to(device) for group in config.kv_groups)
