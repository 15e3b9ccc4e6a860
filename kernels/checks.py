"""What wrappers refuse: every claim of a docstring about shapes, dtypes and layouts, as a check.

Values are never read here: that would make the host wait for the device. The scales of a
checkpoint, which are read once at load, are the exception (`check_scale_values`).
"""

from dataclasses import dataclass

import torch

from kernels import cache_layout
from kernels.tuned import Target

ACTIVATIONS = (torch.float16, torch.bfloat16, torch.float32)
FP8 = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
HEAD_DIMS = (64, 80, 96, 112, 128, 256)
BLOCK_SIZES = (8, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class Scales:
    """What fp8 keys and values are multiplied by when read, and divided by when stored."""

    k: torch.Tensor
    """[1] or [G] fp32: for the whole cache, or for each key/value head."""

    v: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Store:
    """Where rotated keys, and the values, go. As in `store_kv`."""

    v: torch.Tensor
    """[T, G, D]"""

    k_cache: torch.Tensor
    """[N, S, G, D]; in native code, in lanes as well (`cache_layout`)."""

    v_cache: torch.Tensor
    """As `k_cache`."""

    slot_mapping: torch.Tensor
    """[T] int64; -1 stores nothing."""

    scales: Scales | None = None


def check_store(store: Store, k: torch.Tensor, *, tiled: bool = True) -> None:
    """Check where keys [T, G, D] go. `tiled` as in `check_cache`.

    Raises: ValueError if they do not fit.
    """
    check_cache(store.k_cache, store.v_cache, k.dtype, store.scales, tiled=tiled)
    T, G, D = k.shape
    sizes = cache_layout.sizes(store.k_cache)
    if store.v.shape != k.shape or store.v.dtype != k.dtype or sizes[2:] != (G, D):
        raise ValueError(
            f"k {list(k.shape)} {k.dtype} and v {list(store.v.shape)} {store.v.dtype} do not fit a "
            f"cache of {list(store.k_cache.shape)}"
        )
    if store.slot_mapping.shape != (T,) or store.slot_mapping.dtype != torch.int64:
        raise ValueError(
            f"slot_mapping is {list(store.slot_mapping.shape)} {store.slot_mapping.dtype}, must "
            f"be [{T}] int64"
        )
    check_rows("v", store.v)
    check_device(
        k,
        v=store.v,
        k_cache=store.k_cache,
        v_cache=store.v_cache,
        slot_mapping=store.slot_mapping,
    )


def check_scale_values(scales: Scales) -> None:
    """Refuse scales that would turn a cache into zeros, infinities or NaN. Reads them.

    Raises: ValueError if a scale is not a positive finite number.
    """
    for name, scale in (("k", scales.k), ("v", scales.v)):
        bad = scale[~(scale.isfinite() & (scale > 0))]
        if bad.numel():
            raise ValueError(f"{name} scale is {bad[0].item()}, must be positive and finite")


def check_head_dim(head_dim: int) -> None:
    """Raises: ValueError if no kernel has tiles for `head_dim`."""
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim is {head_dim}, must be one of {HEAD_DIMS}")


def check_cache(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    dtype: torch.dtype,
    scales: Scales | None,
    *,
    tiled: bool = True,
) -> None:
    """Check a cache, and its scales, against the dtype of the activations.

    `tiled` kernels are Triton's, for some block sizes and head dimensions, in rows; native code takes
    all block sizes, head dimensions that are multiples of 8, and lanes as well (`cache_layout`).

    Raises: ValueError if they do not fit.
    """
    in_lanes = not tiled and cache_layout.is_in_lanes(k_cache)
    if not in_lanes and (k_cache.dim() != 4 or k_cache.shape != v_cache.shape):
        raise ValueError(
            f"k_cache {list(k_cache.shape)} and v_cache {list(v_cache.shape)} must both be "
            "[N, S, G, D]"
        )
    N, S, G, D = cache_layout.sizes(k_cache)
    expected = cache_layout.layout(N, S, G, D, k_cache.dtype, in_lanes=in_lanes)
    if (k_cache.shape, v_cache.shape) != (expected.k_shape, expected.v_shape):
        raise ValueError(
            f"k_cache {list(k_cache.shape)} and v_cache {list(v_cache.shape)} must be "
            f"{list(expected.k_shape)} and {list(expected.v_shape)}, in lanes"
        )
    if k_cache.dtype != v_cache.dtype:
        raise ValueError(f"k_cache is {k_cache.dtype}, v_cache {v_cache.dtype}, must be one dtype")
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("k_cache and v_cache must be contiguous")
    if tiled:
        check_head_dim(D)
    elif D % 8 or D == 0:
        raise ValueError(f"head_dim is {D}, must be a multiple of 8")
    if S not in BLOCK_SIZES and (tiled or S < 1):
        raise ValueError(f"block_size is {S}, must be one of {BLOCK_SIZES}")
    if dtype not in ACTIVATIONS:
        raise ValueError(f"activations are {dtype}, must be one of {ACTIVATIONS}")
    if k_cache.dtype != dtype and k_cache.dtype not in FP8:
        raise ValueError(f"the cache is {k_cache.dtype}, must be {dtype} or fp8 (e4m3, e5m2)")
    if scales is None:
        return
    if k_cache.dtype not in FP8:
        raise ValueError(f"scales are for fp8, the cache is {k_cache.dtype}")
    for name, scale in (("k", scales.k), ("v", scales.v)):
        if scale.shape not in {(1,), (G,)} or scale.dtype != torch.float32:
            raise ValueError(
                f"{name} scale is {list(scale.shape)} {scale.dtype}, must be [1] or [{G}] float32"
            )
    if scales.k.shape != scales.v.shape:
        raise ValueError(f"k scale is {list(scales.k.shape)}, v scale {list(scales.v.shape)}")


def check_queries(q: torch.Tensor, k_cache: torch.Tensor, scales: Scales | None) -> None:
    """Check queries [T, H, D] against a cache.

    Raises: ValueError if they do not fit.
    """
    _, _, G, D = cache_layout.sizes(k_cache)
    if q.dim() != 3 or q.shape[2] != D or q.shape[1] % G:
        raise ValueError(f"q {list(q.shape)} does not fit a cache of {list(k_cache.shape)}")
    check_rows("q", q)
    check_device(q, k_cache=k_cache)
    if scales is not None:
        check_device(q, k_scale=scales.k, v_scale=scales.v)


def check_requests(
    q: torch.Tensor, block_tables: torch.Tensor, seq_lens: torch.Tensor, R: int
) -> None:
    """Check the columns that describe R requests.

    Raises: ValueError if they do not fit.
    """
    if block_tables.dim() != 2 or block_tables.shape[0] != R or seq_lens.shape != (R,):
        raise ValueError(
            f"block_tables {list(block_tables.shape)} and seq_lens {list(seq_lens.shape)} must be "
            f"[{R}, B] and [{R}]"
        )
    if block_tables.dtype != torch.int32 or seq_lens.dtype != torch.int32:
        raise ValueError(
            f"block_tables are {block_tables.dtype}, seq_lens {seq_lens.dtype}, must be int32"
        )
    if block_tables.stride(1) != 1:
        raise ValueError("a row of block_tables must be contiguous")
    check_contiguous(seq_lens=seq_lens)
    check_device(q, block_tables=block_tables, seq_lens=seq_lens)


def check_attention_options(window: int | None, soft_cap: float | None) -> None:
    """Raises: ValueError if `window` or `soft_cap` is given and not positive."""
    if window is not None and window < 1:
        raise ValueError(f"window is {window}, must be at least 1 (the token itself)")
    if soft_cap is not None and soft_cap <= 0:
        raise ValueError(f"soft_cap is {soft_cap}, must be positive")


def check_rows(name: str, tensor: torch.Tensor) -> None:
    """Raises: ValueError unless everything behind the first dimension is contiguous."""
    if tensor.shape[0] and not tensor[0].is_contiguous():
        raise ValueError(
            f"each token of {name} must be contiguous, its strides are {tensor.stride()}"
        )


def check_contiguous(**tensors: torch.Tensor) -> None:
    """Raises: ValueError if one is not contiguous."""
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, its strides are {tensor.stride()}")


def check_device(like: torch.Tensor, **tensors: torch.Tensor) -> None:
    """Raises: ValueError if one is not where `like` is."""
    for name, tensor in tensors.items():
        if tensor.device != like.device:
            raise ValueError(f"{name} is on {tensor.device}, must be on {like.device}")


def kv_format(cache: torch.Tensor, target: Target) -> str:
    """Return how a kernel reads a cache: `plain` (Triton converts), or `e4m3`, `e5m2` by bytes."""
    if cache.dtype == torch.float8_e4m3fn and target.converts_e4m3:
        return "plain"
    return FP8.get(cache.dtype, "plain")


def as_loaded(cache: torch.Tensor, form: str) -> torch.Tensor:
    """Return the cache as its kernel sees it: bytes, if it converts bytes itself."""
    return cache if form == "plain" else cache.view(torch.uint8)
