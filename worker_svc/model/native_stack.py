"""All layers of a model in one native call: `kernels.cpu_decoder` behind `LayerStack`."""

from collections.abc import Sequence

import torch

from kernels.adapted_linear import AdaptedLinear, AdaptedTokens
from kernels.cpu_build import native_code
from kernels.cpu_decoder import Decoder, DecoderGroup, DecoderLayer, DecoderStep
from kernels.native_linear import native_of
from worker_svc.model.operations import (
    LayerCache,
    LayerParts,
    Linear,
    Mlp,
    StackShape,
    States,
    StepColumns,
)


class NativeStack:
    """See `LayerStack`."""

    def __init__(self, decoder: Decoder, *, has_head: bool) -> None:
        self._decoder = decoder
        self._has_head = has_head

    def run(
        self,
        hidden: torch.Tensor,
        columns: Sequence[StepColumns],
        inverse_frequencies: Sequence[torch.Tensor],
        caches: Sequence[LayerCache],
        read: torch.Tensor | None = None,
    ) -> States:
        """As `LayerStack.run`."""
        first = columns[0]
        groups = [
            DecoderGroup(frequencies, of_group.slot_mapping, of_group.block_tables, of_group.window)
            for of_group, frequencies in zip(columns, inverse_frequencies, strict=True)
        ]
        step = DecoderStep(
            groups, first.positions, first.seq_lens, first.query_start_loc, first.scale, read
        )
        if self._has_head and read is not None:
            return States(*self._decoder.run_to_logits(hidden, step, caches))
        return States(self._decoder.run(hidden, step, caches))


def native_stack(
    layers: Sequence[LayerParts], last_norm: torch.Tensor, lm_head: Linear, shape: StackShape
) -> NativeStack | None:
    """Return the layers, and the head if it has native code, as one call.

    None: some part of a layer has no native code.
    """
    code = native_code()
    if code is None or shape.head_dim % 8:
        return None
    parts = []
    for layer, group in zip(layers, shape.groups, strict=True):
        part = _native_layer(layer, group)
        if part is None:
            return None
        parts.append(part)
    head = native_of(lm_head)
    decoder = Decoder(
        parts,
        last_norm,
        eps=shape.eps,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        code=code,
        adapted=_adapted_tokens(layers),
        head=head,
    )
    return NativeStack(decoder, has_head=head is not None)


def _adapted_tokens(layers: Sequence[LayerParts]) -> AdaptedTokens | None:
    """Return whose adapters the layers add; None: they add none."""
    # An adapted model's layers share one, and all have queries.
    qkv = layers[0].qkv
    return qkv.tokens if isinstance(qkv, AdaptedLinear) else None


def _native_layer(layer: LayerParts, group: int) -> DecoderLayer | None:
    qkv, output, mlp = native_of(layer.qkv), native_of(layer.output), layer.mlp
    gate_up = native_of(mlp.gate_up) if isinstance(mlp, Mlp) else None
    down = native_of(mlp.down if isinstance(mlp, Mlp) else mlp)
    if qkv is None or output is None or down is None:
        return None
    if isinstance(mlp, Mlp) and gate_up is None:
        return None
    return DecoderLayer(
        layer.attention_norm,
        qkv,
        output,
        layer.mlp_norm,
        gate_up,
        down,
        layer.head_norms,
        layer.after_attention_norm,
        layer.after_mlp_norm,
        group,
    )
