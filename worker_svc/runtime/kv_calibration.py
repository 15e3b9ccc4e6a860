"""Scales of fp8 keys for a model that brings none: measured once, on tokens that never change."""

from collections.abc import Iterable
from typing import Final

import torch

from kernels.checks import Scales, check_scale_values
from worker_svc.errors import ConfigError
from worker_svc.model.causal_model import CausalModel
from worker_svc.runtime.plain_sequences import PlainSequences

_NUM_SEQUENCES: Final = 4
_LENGTH: Final = 128

HEADROOM: Final = 2.0
"""How many times what was measured a value may be before it is clamped, at least. Floats of eight
bits have the same precision over a wide range, so room costs little."""


def measure_scales(model: CausalModel, dtype: torch.dtype) -> tuple[Scales, ...]:
    """Return a scale per layer and key/value head, [G] each: the largest value fits twice.

    Rounded up to a power of two. Dividing by it is exact, and runs that differ in the last bits
    (another number of threads or ranks, other kernels) agree but where a maximum lies at its
    edge. Of a head whose keys or values are not finite the scale is not finite either.

    Cost: one step of 512 tokens, of all ranks together.
    """
    largest = torch.finfo(dtype).max
    sequences = _run_fixed_tokens(model)
    stored = (sequences.stored(layer) for layer in range(model.config.num_layers))
    return tuple(Scales(_scale(k, largest), _scale(v, largest)) for k, v in stored)


def check_scales(scales: Iterable[Scales]) -> None:
    """Raise ConfigError if keys or values were not finite when these were measured."""
    for one in scales:
        try:
            check_scale_values(one)
        except ValueError as error:
            raise ConfigError(f"kv_cache_dtype: calibration failed, {error}") from error


def _scale(stored: torch.Tensor, largest: float) -> torch.Tensor:
    """Return a scale per head. Shapes: stored [N, S, G, D], returns [G] fp32."""
    peak = stored.float().abs().amax(dim=(0, 1, 3))
    wanted = torch.where(peak == 0, torch.ones_like(peak), peak * (HEADROOM / largest))
    _, exponent = torch.frexp(wanted)
    return torch.where(wanted.isfinite(), torch.ldexp(torch.ones_like(peak), exponent), wanted)


def _run_fixed_tokens(model: CausalModel) -> PlainSequences:
    """Return a few sequences of scattered token ids, stored in the run dtype."""
    length = min(_LENGTH, model.config.max_position_embeddings)
    sequences = PlainSequences(model, [length] * _NUM_SEQUENCES, model.dtype)
    # Knuth's multiplicative hash (The Art of Computer Programming 3, 6.4): ids all over the
    # vocabulary, the same on every machine.
    ids = [
        place * 2654435761 % (1 << 32) % model.config.vocab_size
        for place in range(_NUM_SEQUENCES * length)
    ]
    sequences.run([ids[start : start + length] for start in range(0, len(ids), length)])
    return sequences
