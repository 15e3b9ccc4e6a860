"""All layers of a Llama in one native call: `kernels.cpu_decoder` behind `LayerStack`."""

from collections.abc import Sequence

import torch

from kernels.cpu_build import native_code
from kernels.cpu_decoder import Decoder, DecoderLayer, DecoderStep
from kernels.native_linear import HasNativeLinear, NativeLinear
from worker_svc.model.operations import LayerCache, LayerParts, StackShape, StepColumns


class NativeStack:
    """See `LayerStack`."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def run(
        self,
        hidden: torch.Tensor,
        columns: StepColumns,
        inverse_frequencies: torch.Tensor,
        caches: Sequence[LayerCache],
    ) -> torch.Tensor:
        """As `LayerStack.run`."""
        angles = columns.positions[:, None].float() * inverse_frequencies  # [T, D / 2]
        step = DecoderStep(
            angles.cos(),
            angles.sin(),
            columns.slot_mapping,
            columns.block_tables,
            columns.seq_lens,
            columns.query_start_loc,
            columns.window,
        )
        return self._decoder.run(hidden, step, caches)


def native_stack(
    layers: Sequence[LayerParts], last_norm: torch.Tensor, shape: StackShape
) -> NativeStack | None:
    """Return the layers as one call. None: some part has no native code."""
    code = native_code()
    if code is None or shape.head_dim % 8:
        return None
    parts = []
    for layer in layers:
        linears = (layer.qkv, layer.output, layer.gate_up, layer.down)
        natives = [_native(linear) for linear in linears]
        if None in natives:
            return None
        qkv, output, gate_up, down = (native for native in natives if native is not None)
        parts.append(DecoderLayer(layer.attention_norm, qkv, output, layer.mlp_norm, gate_up, down))
    decoder = Decoder(
        parts,
        last_norm,
        eps=shape.eps,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        code=code,
    )
    return NativeStack(decoder)


def _native(linear: object) -> NativeLinear | None:
    return linear.native if isinstance(linear, HasNativeLinear) else None
