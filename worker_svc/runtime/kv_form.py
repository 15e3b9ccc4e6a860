"""How keys and values are stored: their dtype, and the scales of an fp8 one."""

import hashlib
from dataclasses import dataclass
from typing import Final

import torch

from kernels.checks import FP8, Scales
from worker_svc.errors import ConfigError
from worker_svc.model.weights import LoadedModel
from worker_svc.runtime.kv_calibration import calibrate_scales

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

    @property
    def scales_name(self) -> str:
        """Eight hex digits that differ when the scales do; empty if there are none."""
        if self.scales is None:
            return ""
        digest = hashlib.sha256()
        for one in self.scales:
            digest.update(torch.cat((one.k, one.v)).cpu().numpy().astype("<f4").tobytes())
        return digest.hexdigest()[:8]


def choose_kv_form(loaded: LoadedModel, dtype: torch.dtype) -> KvForm:
    """Return the form of a cache of `dtype`.

    e4m3 takes the scales of the checkpoint, or measures them. e5m2 takes none: it reaches as far
    as float16, and a scale would not make it more precise.

    Raises: ConfigError if scales cannot be measured.
    """
    if dtype not in FP8:
        return KvForm(dtype, None, "")
    if dtype == torch.float8_e5m2:
        return KvForm(dtype, None, "no scales")
    if loaded.kv_scales is not None:
        return KvForm(dtype, loaded.kv_scales, "static scales of the checkpoint")
    if not loaded.ranks.shard.is_whole:
        # Ranks that come back one by one would wait for each other in the middle of a step.
        raise ConfigError(
            "kv_cache_dtype is fp8 and the checkpoint has no scales: with tensor parallelism it "
            "must be auto or fp8_e5m2"
        )
    scales = calibrate_scales(loaded.model, dtype)
    return KvForm(dtype, scales, "static scales per head, calibrated")
