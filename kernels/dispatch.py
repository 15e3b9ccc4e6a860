"""Which kernels serve which device, dtypes and shapes, and why others do not.

One table, best first. A row says in words why it does not serve a case, or that it does; the
words go to the log, so that nobody has to guess why a server is slow.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels import checks, cost, kept_weight


@dataclass(frozen=True, slots=True)
class Case:
    """What is to be served: one layer's attention on one device."""

    device: str
    """`cuda` (NVIDIA and AMD, as in torch) or `cpu`."""

    target: str
    """`sm_90`, `gfx942`; empty on a CPU."""

    dtype: torch.dtype
    kv_dtype: torch.dtype
    head_dim: int
    block_size: int
    no_native_code: str | None = None
    """Why the CPU's kernels could not be compiled here (`cpu_build`); None if they could."""


@dataclass(frozen=True, slots=True)
class Backend:
    """A family of kernels with one cache layout."""

    name: str
    why_not: Callable[[Case], str | None]
    """Why it does not serve a case; None if it does."""

    by_request: bool = False
    """Whether it is taken only when asked for by name."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The backend taken, and what spoke against those before it in the table."""

    name: str
    rejected: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        """One line for the log."""
        reasons = "; ".join(f"not {name}: {reason}" for name, reason in self.rejected)
        return f"attention backend {self.name}" + (f" ({reasons})" if reasons else "")


def _triton(case: Case) -> str | None:
    if case.device != "cuda":
        return f"the device is {case.device}, Triton needs a GPU"
    if case.target.startswith("sm_") and int(case.target[3:]) < 80:
        return f"the GPU is {case.target}, the kernels need sm_80 (bf16, asynchronous copies)"
    return _no_tiles(case)


def _no_tiles(case: Case) -> str | None:
    if case.dtype not in checks.ACTIVATIONS:
        return f"activations are {case.dtype}, must be one of {checks.ACTIVATIONS}"
    if case.kv_dtype != case.dtype and case.kv_dtype not in checks.FP8:
        return f"the cache is {case.kv_dtype}, must be {case.dtype} or fp8"
    if case.head_dim not in checks.HEAD_DIMS:
        return f"head_dim is {case.head_dim}, must be one of {checks.HEAD_DIMS}"
    if case.block_size not in checks.BLOCK_SIZES:
        return f"block_size is {case.block_size}, must be one of {checks.BLOCK_SIZES}"
    return None


def _classic(case: Case) -> str | None:
    if case.kv_dtype != case.dtype:
        return f"the cache is {case.kv_dtype}, must be {case.dtype}"
    return _triton(case)


def _native(case: Case) -> str | None:
    if case.device != "cpu":
        return f"the device is {case.device}, native code is for CPUs"
    if case.no_native_code is not None:
        return f"{case.no_native_code}; decoding takes some ten times as long"
    if case.dtype not in checks.ACTIVATIONS:
        return f"activations are {case.dtype}, must be one of {checks.ACTIVATIONS}"
    if case.kv_dtype != case.dtype and case.kv_dtype not in checks.FP8:
        return f"the cache is {case.kv_dtype}, must be {case.dtype} or fp8"
    if case.head_dim % 8:
        return f"head_dim is {case.head_dim}, must be a multiple of 8"
    return None


def _torch(case: Case) -> str | None:
    if case.kv_dtype != case.dtype and case.kv_dtype not in checks.FP8:
        return f"the cache is {case.kv_dtype}, must be {case.dtype} or fp8"
    return None


BACKENDS = (
    Backend("triton", _triton),
    # It reads H / G times what `triton` reads: for lessons and benchmarks.
    Backend("triton-classic", _classic, by_request=True),
    Backend("native", _native),
    Backend("torch", _torch),
)


def choose(
    case: Case, override: str | None = None, backends: tuple[Backend, ...] = BACKENDS
) -> Choice:
    """Return the first backend that serves `case`, or the one named by `override`.

    Raises: ValueError if none does, or not that one; the message says why.
    """
    if override is not None:
        for backend in backends:
            if backend.name == override:
                reason = backend.why_not(case)
                if reason is not None:
                    raise ValueError(f"attention backend {override} cannot serve: {reason}")
                return Choice(override, ())
        names = ", ".join(backend.name for backend in backends)
        raise ValueError(f"attention backend is {override!r}, must be one of {names}")
    rejected: list[tuple[str, str]] = []
    for backend in backends:
        if backend.by_request:
            continue
        reason = backend.why_not(case)
        if reason is None:
            return Choice(backend.name, tuple(rejected))
        rejected.append((backend.name, reason))
    reasons = "; ".join(f"{name}: {reason}" for name, reason in rejected)
    raise ValueError(f"no attention backend serves: {reasons}")


@dataclass(frozen=True, slots=True)
class WeightCase:
    """A matrix of few bits that a GPU is to multiply."""

    target: str
    """As in `Case`."""

    group: int | None
    """Inputs in a row that share a scale, as `kept_weight.group_of` says."""

    same_order: bool = True
    """Whether matrices above one another have their inputs in the same order."""


def why_not_kept(case: WeightCase) -> str | None:
    """Return why `quantised_matmul` does not serve, so that weights are dequantised, or None."""
    if case.target.startswith("sm_") and int(case.target[3:]) < 80:
        return f"the GPU is {case.target}, quantised_matmul needs sm_80"
    if not case.same_order:
        return "matrices of one layer have their inputs in different orders"
    if case.group is None:
        least = kept_weight.GROUPS[-1]
        return f"inputs that share a scale are not in whole groups of {least} or more"
    return None


# What `shared_prefix` must save to pay for its third launch, and for rows that wait for each other.
_CASCADE_GAIN = 1.2
_CASCADE_LAUNCH_BYTES = 32 << 20
"""What an H200 reads in the 8 us of a launch. Derived, not measured."""


def cascade_pays(
    num_requests: int, prefix: int, own_tokens: int, heads: cost.Heads, rows: int = 128
) -> bool:
    """Return whether `shared_prefix` moves so much less than `paged_decode` that it is faster.

    `prefix` counts the tokens all requests share, `own_tokens` the sum of the others, `rows` the
    height of the tile.
    """
    together = cost.cascade_kv_bytes(num_requests, prefix, own_tokens, heads, rows)
    alone = (num_requests * prefix + own_tokens) * heads.kv_bytes
    return alone > together * _CASCADE_GAIN + _CASCADE_LAUNCH_BYTES
