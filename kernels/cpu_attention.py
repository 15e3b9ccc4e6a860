"""Attention over paged keys and values on a CPU, in native code (kernels/cpu)."""

import ctypes

import torch

from kernels import cache_layout, cpu_threads
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


class AttentionArguments(ctypes.Structure):
    """`Attention` of kernels/cpu/attention.h, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "q", "k_cache", "v_cache", "out", "block_tables", "seq_lens", "query_start_loc",
            "k_scale", "v_scale",
        )),
        *((name, ctypes.c_int64) for name in (
            "q_stride", "table_stride", "scale_stride", "R", "H", "G", "D", "S",
            "in_lanes", "window", "dtype", "kv_dtype", "num_threads",
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

    Shapes: as there, but for blocks of any size and head dimensions of any multiple of 8; the
        cache in rows or in lanes (`cache_layout`).

    Raises: ValueError if a shape, layout or dtype is not as there. Values are not read.
        MemoryError.
    Numerics: scores and sums in fp32. On processors that multiply bf16, weights are rounded to it
        when q is; elsewhere they are not.
        Without native code the reference serves, in fp32.
    Cost: a request with one new token reads its keys and values once, in as many parts as keep
        all threads busy; others read them once per 192 rows of (token, head). Of rows, keys are
        laid out in lanes first, which costs some 5 instructions per 64 bytes.
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
        k_cache, v_cache = cache_layout.to_rows(k_cache, v_cache)
        return out.copy_(
            attention(q, k_cache, v_cache, block_tables, seq_lens, starts, scale,
                      window=window, soft_cap=soft_cap, scales=scales)
        )  # fmt: skip
    _, S, G, _ = cache_layout.sizes(k_cache)
    arguments = AttentionArguments(
        q=q.data_ptr(),
        k_cache=k_cache.data_ptr(),
        v_cache=v_cache.data_ptr(),
        out=out.data_ptr(),
        block_tables=block_tables.data_ptr(),
        seq_lens=seq_lens.data_ptr(),
        query_start_loc=None if query_start_loc is None else query_start_loc.data_ptr(),
        k_scale=None if scales is None else scales.k.data_ptr(),
        v_scale=None if scales is None else scales.v.data_ptr(),
        q_stride=q.stride(0),
        table_stride=block_tables.stride(0),
        scale_stride=0 if scales is None or scales.k.shape[0] == 1 else 1,
        R=R,
        H=H,
        G=G,
        D=D,
        S=S,
        in_lanes=cache_layout.is_in_lanes(k_cache),
        window=window or 0,
        dtype=TYPES[q.dtype],
        kv_dtype=TYPES[k_cache.dtype],
        num_threads=num_threads or cpu_threads.num_threads(),
        scale=scale,
        soft_cap=soft_cap or 0.0,
    )
    if code.pagemill_attention(ctypes.byref(arguments)) != 0:
        raise MemoryError("no memory for the scratch space of attention")
    return out


def _check_starts(q: torch.Tensor, query_start_loc: torch.Tensor, R: int) -> None:
    if query_start_loc.shape != (R + 1,) or query_start_loc.dtype != torch.int32:
        raise ValueError(
            f"query_start_loc is {list(query_start_loc.shape)} {query_start_loc.dtype}, must be "
            f"[{R + 1}] int32"
        )
    check_contiguous(query_start_loc=query_start_loc)
    check_device(q, query_start_loc=query_start_loc)
