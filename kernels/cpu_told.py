"""Log-probabilities, ranks and likeliest tokens of logits on a CPU (kernels/cpu/told.h)."""

import ctypes

import torch

from kernels import cpu_threads, reference_told
from kernels.checks import ACTIVATIONS, check_contiguous, check_device
from kernels.cpu_build import TYPES, native_code


class _Told(ctypes.Structure):
    """`Told` of kernels/cpu/told.h, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "logits", "places", "tokens", "starts", "keys", "ids", "ids_logprobs", "logprobs",
            "ranks",
        )),
        *((name, ctypes.c_int64) for name in ("stride", "V", "T", "dtype", "num_threads")),
    )  # fmt: skip


def tell_tokens(
    logits: torch.Tensor,
    places: torch.Tensor,
    tokens: torch.Tensor,
    *,
    code: ctypes.CDLL | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities and ranks of tokens, each of one row of logits.

    Rank 1 is the likeliest; of equal logits the lower id comes first.

    Shapes:
        logits       [S, V]  fp32, bf16 or fp16, each row contiguous
        places       [T]     int64, which row: 0 to S - 1
        tokens       [T]     int32, 0 to V - 1
        returns      [T]     fp32, at most 0, and [T] int32

    Raises: ValueError if a shape, layout or dtype is not as above. Places and tokens are not read.
    Numerics: weights in fp32, within two units in the last place, sums in fp64; the log-probability
        of a row with NaN or +inf, or with -inf alone, is NaN.
    Invariant: what a row gives is bitwise the same whatever stands beside it, on any number of
        threads.
    """
    _check(logits, places)
    if tokens.shape != places.shape or tokens.dtype != torch.int32:
        raise ValueError(f"tokens is {list(tokens.shape)} {tokens.dtype}, must be [T] int32")
    check_contiguous(tokens=tokens)
    check_device(logits, tokens=tokens)
    code = code or native_code()
    if code is None:
        return reference_told.tell_tokens(logits, places, tokens)
    logprobs = torch.empty(len(places), dtype=torch.float32)
    ranks = torch.empty(len(places), dtype=torch.int32)
    arguments = _arguments(logits, places)
    arguments.tokens = tokens.data_ptr()
    arguments.logprobs, arguments.ranks = logprobs.data_ptr(), ranks.data_ptr()
    code.pagemill_tell(ctypes.byref(arguments))
    return logprobs, ranks


def tell_likeliest(
    logits: torch.Tensor,
    places: torch.Tensor,
    counts: torch.Tensor,
    *,
    code: ctypes.CDLL | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return so many of each row's likeliest tokens, the likeliest first, row after row.

    Shapes:
        logits, places       as in `tell_tokens`
        counts               [T]  int64, 0 to V
        returns              [C]  int32 ids and [C] fp32 log-probabilities; C = sum(counts)

    Raises, Numerics, Invariant: as in `tell_tokens`; ValueError, too, if a count is above V.
    """
    _check(logits, places)
    if counts.shape != places.shape or counts.dtype != torch.int64:
        raise ValueError(f"counts is {list(counts.shape)} {counts.dtype}, must be [T] int64")
    check_device(logits, counts=counts)
    starts = torch.zeros(len(counts) + 1, dtype=torch.int64)
    torch.cumsum(counts, 0, out=starts[1:])
    if len(counts) and not 0 <= int(counts.min()) <= int(counts.max()) <= logits.shape[1]:
        raise ValueError(f"counts are {counts.tolist()}, must be 0 to {logits.shape[1]}")
    code = code or native_code()
    if code is None:
        return reference_told.tell_likeliest(logits, places, counts)
    num_ids = int(starts[-1])
    ids = torch.empty(num_ids, dtype=torch.int32)
    logprobs = torch.empty(num_ids, dtype=torch.float32)
    keys = torch.empty(num_ids, dtype=torch.int64)
    arguments = _arguments(logits, places)
    arguments.starts, arguments.keys = starts.data_ptr(), keys.data_ptr()
    arguments.ids, arguments.ids_logprobs = ids.data_ptr(), logprobs.data_ptr()
    code.pagemill_tell(ctypes.byref(arguments))
    return ids, logprobs


def _arguments(logits: torch.Tensor, places: torch.Tensor) -> _Told:
    return _Told(
        logits=logits.data_ptr(), places=places.data_ptr(), stride=logits.stride(0),
        V=logits.shape[1], T=len(places), dtype=TYPES[logits.dtype],
        num_threads=cpu_threads.num_threads(),
    )  # fmt: skip


def _check(logits: torch.Tensor, places: torch.Tensor) -> None:
    if logits.dim() != 2 or logits.dtype not in ACTIVATIONS or logits.shape[1] == 0:
        raise ValueError(
            f"logits is {list(logits.shape)} {logits.dtype}, must be [S, V] of {ACTIVATIONS}"
        )
    if logits.device.type != "cpu" or (len(logits) and logits.stride(1) != 1):
        raise ValueError(f"logits is on {logits.device} with strides {logits.stride()}")
    if places.dim() != 1 or places.dtype != torch.int64:
        raise ValueError(f"places is {list(places.shape)} {places.dtype}, must be [T] int64")
    check_contiguous(places=places)
    check_device(logits, places=places)
