"""How keys and values are stored: their dtype, and the scales of an fp8 one."""

import hashlib
from dataclasses import dataclass
from typing import Final

import torch

from kernels.checks import FP8, Scales
from worker_svc.model.weights import LoadedModel
from worker_svc.runtime.kv_calibration import check_scales, measure_scales
from worker_svc.runtime.rank_scales import share_scales

KV_DTYPES: Final = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
"""Those of `--kv-cache-dtype` that are no dtype of activations."""


@dataclass(frozen=True, slots=True, eq=False)
class KvForm:
    """What a cache stores, and by which scales. The same for every token, however it was run."""

    dtype: torch.dtype
    scales: tuple[Scales, ...] | None
    """Of each layer, [G]. None: 1, or not fp8."""

    origin: str
    """Where the scales come from, in words. Empty: the cache is not fp8."""

    lacks_scales: bool = False
    """The scales are 1 since nobody brought or measured any."""

    @property
    def scales_name(self) -> str:
        """Eight hex digits that differ when the scales do; empty if there are none."""
        if self.scales is None:
            return ""
        digest = hashlib.sha256()
        for one in self.scales:
            digest.update(torch.cat((one.k, one.v)).cpu().numpy().astype("<f4").tobytes())
        return digest.hexdigest()[:8]


def choose_kv_form(
    loaded: LoadedModel,
    dtype: torch.dtype,
    kept: KvForm | None = None,
    *,
    measures: bool = True,
) -> KvForm:
    """Return the form of a cache of `dtype`; `kept`, if that is how a cache is stored already.

    e4m3 takes the scales of the checkpoint. Without any they are measured, or 1 if a rank does not
    want to. e5m2 takes none: it reaches as far as float16, and a scale would not make it more
    precise.

    All ranks of a group call this at once, each time they have met. Where one of them has no
    scales yet, all measure together: the model runs on all of them or on none.

    Raises: ConfigError if scales cannot be measured, on all ranks; RanksLostError.
    """
    if dtype not in FP8:
        return KvForm(dtype, None, "")
    if dtype == torch.float8_e5m2:
        return KvForm(dtype, None, "no scales")
    if loaded.kv_scales is not None:
        return KvForm(dtype, loaded.kv_scales, "static scales of the checkpoint")
    everybody_has = loaded.ranks.least(kept is not None)
    if kept is not None and everybody_has:
        return kept
    # Ranks that were told different things do the same: what needs no measuring.
    if not loaded.ranks.least(measures):
        return kept or KvForm(dtype, _ones(loaded), "scales of 1", lacks_scales=True)
    measured = measure_scales(loaded.model, dtype)
    old = None if kept is None else kept.scales
    shared = share_scales(measured, old, loaded.kv_heads, loaded.ranks)
    check_scales(shared)
    mine = slice(loaded.kv_heads.mine.start, loaded.kv_heads.mine.stop)
    scales = tuple(Scales(one.k[mine].clone(), one.v[mine].clone()) for one in shared)
    return KvForm(dtype, scales, "static scales per head, calibrated")


def _ones(loaded: LoadedModel) -> tuple[Scales, ...]:
    """Return a scale of 1 for each layer and head of this rank."""
    config, device = loaded.model.config, loaded.model.device
    one = torch.ones(config.num_kv_heads, device=device)
    return tuple(Scales(one, one) for _ in range(config.num_layers))
