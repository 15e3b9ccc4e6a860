"""Scales of fp8 keys and values that come with a checkpoint."""

from collections.abc import Callable, Collection
from typing import Final

import torch

from kernels.checks import Scales, check_scale_values
from worker_svc.errors import ModelError

_NAMES: Final = {
    "k": ("k_scale", "attn.k_scale", "k_proj.k_scale", "k_proj.output_scale", "kv_scale"),
    "v": ("v_scale", "attn.v_scale", "v_proj.v_scale", "v_proj.output_scale", "kv_scale"),
}
"""What compressed-tensors, vLLM and ModelOpt call them, behind `model.layers.N.self_attn.`."""

_UNUSED: Final = ("q_scale", "attn.q_scale", "prob_scale", "attn.prob_scale")
"""Of attention in fp8 arithmetic. Ours is in the run dtype."""


def read_kv_scales(
    names: Collection[str],
    read: Callable[[str], torch.Tensor],
    num_layers: int,
    num_kv_heads: int,
    device: torch.device,
) -> tuple[tuple[Scales, ...] | None, frozenset[str]]:
    """Return the scales [G] of each layer, None if there are none, and the tensors that are known.

    A checkpoint has one for a whole layer, or one per key/value head.

    Raises: ModelError if some layers lack theirs, or one has another shape, or is not positive
        and finite.
    """
    known: set[str] = set()
    layers: list[Scales | None] = []
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}.self_attn."
        found: dict[str, torch.Tensor] = {}
        for kind, candidates in _NAMES.items():
            present = [prefix + name for name in candidates if prefix + name in names]
            known.update(present)
            if present:
                found[kind] = _read(present[0], read, num_kv_heads).to(device)
        known.update(prefix + name for name in _UNUSED if prefix + name in names)
        if len(found) == 1:
            raise ModelError(f"{prefix}: has a scale of {next(iter(found))} only, must have both")
        layers.append(Scales(found["k"], found["v"]) if found else None)
    scales = tuple(one for one in layers if one is not None)
    if not scales:
        return None, frozenset(known)
    if len(scales) != num_layers:
        raise ModelError(f"layer {layers.index(None)} has no scales of keys and values, others do")
    for one in scales:
        try:
            check_scale_values(one)
        except ValueError as error:
            raise ModelError(f"the checkpoint's {error}") from error
    return scales, frozenset(known)


def _read(name: str, read: Callable[[str], torch.Tensor], num_kv_heads: int) -> torch.Tensor:
    scale = read(name).float().reshape(-1)
    if len(scale) not in {1, num_kv_heads}:
        raise ModelError(f"tensor {name} has {len(scale)} elements, must have 1 or {num_kv_heads}")
    return scale.expand(num_kv_heads).contiguous()
