"""Tokens from logits on a CPU: the likeliest, and draws (kernels/cpu/draw.h)."""

import ctypes
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels import cpu_threads
from kernels.checks import check_contiguous, check_device
from kernels.cpu_build import native_code
from kernels.reference_draw import draw_token


@dataclass(frozen=True, slots=True, eq=False)
class Draws:
    """How tokens are drawn, one entry each. Shape of each: [D]."""

    places: torch.Tensor
    """int64. Which row of the logits."""

    temperatures: torch.Tensor
    """fp64, above 0, as all below but for `top_ks`."""

    top_ks: torch.Tensor
    """int64. Keep so many of the most likely tokens. 0: all."""

    top_ps: torch.Tensor
    """Keep the fewest most likely tokens that have this much probability. 1: all."""

    min_ps: torch.Tensor
    """Keep tokens at least this probable, relative to the most likely one. 0: all."""

    shares: torch.Tensor
    """In [0, 1): which part of the probability lies before the token, most likely first."""


class _Draws(ctypes.Structure):
    """`Draws` of kernels/cpu/draw.h, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "logits", "places", "temperatures", "top_ks", "top_ps", "min_ps", "shares", "tokens",
        )),
        *((name, ctypes.c_int64) for name in ("stride", "V", "D", "num_threads")),
    )  # fmt: skip


class _Likeliest(ctypes.Structure):
    """`Likeliest` of kernels/cpu/draw.h, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "tokens", "scores")),
        *((name, ctypes.c_int64) for name in ("stride", "V", "S", "num_threads")),
    )


def likeliest(
    logits: torch.Tensor, *, code: ctypes.CDLL | None = None
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Return each row's first largest logit: its place, and itself. NaN counts as the largest.

    Shapes: logits [S, V] fp32, each row contiguous; returns [S] each.

    Raises: ValueError if a shape, layout or dtype is not so.
    """
    _check_logits(logits)
    S, V = logits.shape
    code = code or native_code()
    if code is None:
        rows = logits.numpy()
        places = rows.argmax(axis=-1)
        return places.astype(np.int32), rows[np.arange(S), places]
    tokens, scores = np.empty(S, dtype=np.int32), np.empty(S, dtype=np.float32)
    arguments = _Likeliest(
        logits.data_ptr(), tokens.ctypes.data, scores.ctypes.data, logits.stride(0), V, S,
        cpu_threads.num_threads(),
    )  # fmt: skip
    code.pagemill_likeliest(ctypes.byref(arguments))
    return tokens, scores


def draw(logits: torch.Tensor, draws: Draws, *, code: ctypes.CDLL | None = None) -> torch.Tensor:
    """Return the token at each draw's share of the probabilities that its filters keep.

    Most likely first, of equal logits the lower id. The filters work in the order min_p, top_k,
    top_p, each on what the one before has kept.

    Shapes: logits [S, V] fp32, each row contiguous, its largest finite; returns [D] int32.

    Raises: ValueError if a shape, layout or dtype is not as said here or in `Draws`. Values are not
        read. MemoryError.
    Numerics: weights in fp32, within some units in the last place, sums in fp64.
    Invariant: what a draw gives depends on its own row and numbers alone, on any number of threads.
    Cost: two passes over a row; tokens far from likely are sorted only where the draw, or the end
        of a filter, falls among them.
    """
    _check(logits, draws)
    code = code or native_code()
    if code is None:
        return _draw_one_by_one(logits, draws)
    tokens = torch.empty(len(draws.places), dtype=torch.int32)
    arguments = _Draws(
        logits=logits.data_ptr(), places=draws.places.data_ptr(),
        temperatures=draws.temperatures.data_ptr(), top_ks=draws.top_ks.data_ptr(),
        top_ps=draws.top_ps.data_ptr(), min_ps=draws.min_ps.data_ptr(),
        shares=draws.shares.data_ptr(), tokens=tokens.data_ptr(), stride=logits.stride(0),
        V=logits.shape[1], D=len(tokens), num_threads=cpu_threads.num_threads(),
    )  # fmt: skip
    if code.pagemill_draw(ctypes.byref(arguments)):
        raise MemoryError("no memory for the scratch space of draws")
    return tokens


def _draw_one_by_one(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    scores = logits.numpy()
    columns = (
        draws.places, draws.temperatures, draws.top_ks, draws.top_ps, draws.min_ps, draws.shares,
    )  # fmt: skip
    tokens = [
        draw_token(scores[place], *each)
        for place, *each in zip(*(column.tolist() for column in columns), strict=True)
    ]
    return torch.tensor(tokens, dtype=torch.int32)


def _check_logits(logits: torch.Tensor) -> None:
    if logits.dim() != 2 or logits.dtype != torch.float32 or logits.shape[1] == 0:
        raise ValueError(f"logits is {list(logits.shape)} {logits.dtype}, must be [S, V] float32")
    if logits.device.type != "cpu" or (len(logits) and logits.stride(1) != 1):
        raise ValueError(f"logits is on {logits.device} with strides {logits.stride()}")


def _check(logits: torch.Tensor, draws: Draws) -> None:
    _check_logits(logits)
    if draws.places.dim() != 1:
        raise ValueError(f"places is {list(draws.places.shape)}, must be [D]")
    for name, dtype in (
        ("places", torch.int64),
        ("temperatures", torch.float64),
        ("top_ks", torch.int64),
        ("top_ps", torch.float64),
        ("min_ps", torch.float64),
        ("shares", torch.float64),
    ):
        column = getattr(draws, name)
        if column.shape != draws.places.shape or column.dtype != dtype:
            raise ValueError(f"{name} is {list(column.shape)} {column.dtype}, must be [D] {dtype}")
        check_contiguous(**{name: column})
        check_device(logits, **{name: column})
