"""Attention over paged keys and values on a CPU, in native code (kernels/cpu)."""

import ctypes

import torch

from kernels.checks import (
    Scales,
    check_attention_options,
    check_cache,
    check_contiguous,
    check_device,
    check_queries,
    check_requests,
)
from kernels.cpu_build import TYPES, native_code
from kernels.reference_attention import attention


class _Attention(ctypes.Structure):
    """`Attention` of kernels/cpu/attention.h, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "q", "k_cache", "v_cache", "out", "block_tables", "seq_lens", "query_start_loc",
            "k_scale", "v_scale",
        )),
        *((name, ctypes.c_int64) for name in (
            "q_stride", "table_stride", "scale_stride", "R", "H", "G", "D", "S", "window",
            "dtype", "kv_dtype", "num_threads",
        )),
        ("scale", ctypes.c_double),
        ("soft_cap", ctypes.c_double),
    )  # fmt: skip


def attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    scale: float,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    scales: Scales | None = None,
    out: torch.Tensor | None = None,
    num_threads: int | None = None,
    code: ctypes.CDLL | None = None,
) -> torch.Tensor:
    """Return what `paged_prefill` does, or `paged_decode` without `query_start_loc`.

    Shapes: as there, but for blocks of any size and head dimensions of any multiple of 8.

    Raises: ValueError if a shape, layout or dtype is not as there. Values are not read.
        MemoryError.
    Numerics: scores and sums in fp32. On processors that multiply bf16, weights are rounded to it
        when q is; elsewhere they are not.
        Without native code the reference serves, in fp32.
    Cost: a request with one new token reads its keys and values once, in as many parts as keep
        all threads busy; others read them once per 192 rows of (token, head).
    """
    check_cache(k_cache, v_cache, q.dtype, scales, tiled=False)
    check_queries(q, k_cache, scales)
    T, H, D = q.shape
    R = seq_lens.shape[0]
    check_requests(q, block_tables, seq_lens, R)
    check_attention_options(window, soft_cap)
    if query_start_loc is None:
        if R != T:
            raise ValueError(f"q has {T} tokens, seq_lens {R}")
    else:
        _check_starts(q, query_start_loc, R)
    if out is None:
        out = torch.empty((T, H, D), dtype=q.dtype)
    if out.shape != q.shape or out.dtype != q.dtype:
        raise ValueError(f"out is {list(out.shape)} {out.dtype}, q {list(q.shape)} {q.dtype}")
    check_contiguous(out=out)
    if T == 0 or R == 0:
        return out
    code = code or native_code()
    if code is None:
        starts = query_start_loc
        if starts is None:
            starts = torch.arange(R + 1, dtype=torch.int32)
        return out.copy_(
            attention(q, k_cache, v_cache, block_tables, seq_lens, starts, scale,
                      window=window, soft_cap=soft_cap, scales=scales)
        )  # fmt: skip
    arguments = _arguments(
        q, k_cache, v_cache, block_tables, seq_lens, query_start_loc, scale,
        window=window, soft_cap=soft_cap, scales=scales, num_threads=num_threads,
    )  # fmt: skip
    arguments.out = out.data_ptr()
    _run(code, arguments)
    return out


class StepAttend:
    """`attend` for the layers of one step, which differ in queries and caches only.

    The first layer's call is checked as `attend` checks it; of later ones only what differs is
    looked at. Layers whose windows, soft caps or scales differ take one object each.
    """

    def __init__(
        self,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        query_start_loc: torch.Tensor | None,
        scale: float,
        *,
        window: int | None = None,
        soft_cap: float | None = None,
        scales: Scales | None = None,
    ) -> None:
        self._rows = (block_tables, seq_lens, query_start_loc, scale)
        self._window, self._soft_cap, self._scales = window, soft_cap, scales
        self._code = native_code()
        self._arguments: _Attention | None = None
        self._layouts: tuple[object, ...] = ()

    def __call__(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor
    ) -> torch.Tensor:
        """Return what `attend` does, checked anew where a layout is not the first call's.

        Shapes: q [T, H, D]; caches [N, S, G, D].
        Raises: as `attend`.
        """
        layouts = (
            q.shape, q.stride(), q.dtype, k_cache.shape, k_cache.stride(), k_cache.dtype,
            v_cache.shape, v_cache.stride(), v_cache.dtype,
        )  # fmt: skip
        arguments = self._arguments
        if arguments is None or self._code is None or layouts != self._layouts:
            return self._first(q, k_cache, v_cache, layouts)
        out = torch.empty(q.shape, dtype=q.dtype)
        arguments.q, arguments.out = q.data_ptr(), out.data_ptr()
        arguments.k_cache, arguments.v_cache = k_cache.data_ptr(), v_cache.data_ptr()
        _run(self._code, arguments)
        return out

    def _first(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
        layouts: tuple[object, ...],
    ) -> torch.Tensor:  # fmt: skip
        window, soft_cap, scales = self._window, self._soft_cap, self._scales
        out = attend(q, k_cache, v_cache, *self._rows, window=window, soft_cap=soft_cap,
                     scales=scales)  # fmt: skip
        # Nothing was called for an empty step, nor was anything looked at.
        if out.numel() and self._rows[1].numel():
            self._layouts = layouts
            self._arguments = _arguments(q, k_cache, v_cache, *self._rows, window=window,
                                         soft_cap=soft_cap, scales=scales)  # fmt: skip
        return out


def _arguments(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_tables: torch.Tensor,
    seq_lens: torch.Tensor, query_start_loc: torch.Tensor | None, scale: float, *,
    window: int | None, soft_cap: float | None, scales: Scales | None,
    num_threads: int | None = None,
) -> _Attention:  # fmt: skip
    """Return a call's arguments, but for `out`. The tensors must outlive them."""
    S, G = k_cache.shape[1:3]
    return _Attention(
        q=q.data_ptr(),
        k_cache=k_cache.data_ptr(),
        v_cache=v_cache.data_ptr(),
        block_tables=block_tables.data_ptr(),
        seq_lens=seq_lens.data_ptr(),
        query_start_loc=None if query_start_loc is None else query_start_loc.data_ptr(),
        k_scale=None if scales is None else scales.k.data_ptr(),
        v_scale=None if scales is None else scales.v.data_ptr(),
        q_stride=q.stride(0),
        table_stride=block_tables.stride(0),
        scale_stride=0 if scales is None or scales.k.shape[0] == 1 else 1,
        R=seq_lens.shape[0],
        H=q.shape[1],
        G=G,
        D=q.shape[2],
        S=S,
        window=window or 0,
        dtype=TYPES[q.dtype],
        kv_dtype=TYPES[k_cache.dtype],
        num_threads=num_threads or torch.get_num_threads(),
        scale=scale,
        soft_cap=soft_cap or 0.0,
    )


def _run(code: ctypes.CDLL, arguments: _Attention) -> None:
    if code.pagemill_attention(ctypes.byref(arguments)) != 0:
        raise MemoryError("no memory for the scratch space of attention")


def _check_starts(q: torch.Tensor, query_start_loc: torch.Tensor, R: int) -> None:
    if query_start_loc.shape != (R + 1,) or query_start_loc.dtype != torch.int32:
        raise ValueError(
            f"query_start_loc is {list(query_start_loc.shape)} {query_start_loc.dtype}, must be "
            f"[{R + 1}] int32"
        )
    check_contiguous(query_start_loc=query_start_loc)
    check_device(q, query_start_loc=query_start_loc)
