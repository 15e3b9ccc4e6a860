"""How a cache lies in memory: in rows, as a token is stored, or in lanes, as a CPU multiplies it.

Rows: keys and values [N, S, G, D]. Lanes: keys [N, G, S / 16, D / x, 16, x], where x elements are
32 bits, and values [N, G, S, D]. 64 bytes of such keys are 16 tokens, and what a vector of them is
multiplied by sums up to 16 scores, one a lane; and one head's keys lie side by side.
"""

from typing import Final, NamedTuple

import torch

LANES: Final = 16
"""Tokens side by side."""

_WORD_BYTES: Final = 4


class CacheLayout(NamedTuple):
    """The shapes of a cache."""

    k_shape: tuple[int, ...]
    v_shape: tuple[int, ...]


def layout(
    N: int, S: int, G: int, D: int, dtype: torch.dtype, *, in_lanes: bool = False
) -> CacheLayout:
    """Return the shapes of N blocks of S slots, in rows; in lanes if asked for, and S allows it.

    Lanes need an S that is a multiple of 16, and a D that is one of the elements in 32 bits.
    """
    x = _WORD_BYTES // dtype.itemsize
    if not in_lanes or S % LANES or D % x:
        return CacheLayout((N, S, G, D), (N, S, G, D))
    return CacheLayout((N, G, S // LANES, D // x, LANES, x), (N, G, S, D))


def is_in_lanes(k_cache: torch.Tensor) -> bool:
    """Tell by the number of dimensions."""
    return k_cache.dim() == 6


def sizes(k_cache: torch.Tensor) -> tuple[int, int, int, int]:
    """Return N, S, G, D of a cache's keys, in either layout."""
    if is_in_lanes(k_cache):
        N, G, groups, words, lanes, x = k_cache.shape
        return N, groups * lanes, G, words * x
    N, S, G, D = k_cache.shape
    return N, S, G, D


def to_lanes(k_cache: torch.Tensor, v_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a copy of a cache in rows [N, S, G, D], S a multiple of 16, in lanes."""
    N, S, G, D = k_cache.shape
    x = _WORD_BYTES // k_cache.dtype.itemsize
    # As integers: copies of fp8 are not known everywhere.
    keys = _as_integers(k_cache).view(N, S // LANES, LANES, G, D // x, x)
    values = _as_integers(v_cache).transpose(1, 2).contiguous()
    in_lanes = keys.permute(0, 3, 1, 4, 2, 5).contiguous()
    return in_lanes.view(k_cache.dtype), values.view(v_cache.dtype)


def to_rows(k_cache: torch.Tensor, v_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a cache in rows, copied if it is in lanes: the inverse of `to_lanes`."""
    if not is_in_lanes(k_cache):
        return k_cache, v_cache
    shape = sizes(k_cache)
    keys = _as_integers(k_cache).permute(0, 2, 4, 1, 3, 5).contiguous().view(shape)
    values = _as_integers(v_cache).transpose(1, 2).contiguous()
    return keys.view(k_cache.dtype), values.view(v_cache.dtype)


def _as_integers(cache: torch.Tensor) -> torch.Tensor:
    return cache.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[cache.dtype.itemsize])
