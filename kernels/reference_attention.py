"""What the attention kernels must compute: dense, one request at a time, every option included."""

import math

import torch

from kernels.checks import FP8, Scales


def quantise(values: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Return what a cache of `dtype` holds for values [T, G, D]."""
    if dtype not in FP8:
        return values.to(dtype)
    scaled = values.float() if scale is None else values.float() / scale.view(-1, 1)
    largest = torch.finfo(dtype).max
    return scaled.clamp(-largest, largest).to(dtype)


def dequantise(cached: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Return the fp32 values of cached keys or values [..., G, D]."""
    return cached.float() if scale is None else cached.float() * scale.view(-1, 1)


def attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    scale: float,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    scales: Scales | None = None,
) -> torch.Tensor:
    """Return, in fp32, what `paged_prefill` computes. Shapes: as there.

    A request with seq_len 0 gives 0.
    """
    _, H, D = q.shape
    S, G = k_cache.shape[1:3]
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    keys, values = k_cache.view(-1, G, D), v_cache.view(-1, G, D)
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    for row, (start, end, length) in enumerate(zip(starts, starts[1:], lengths, strict=False)):
        if end == start or length == 0:
            continue
        place = torch.arange(length - (end - start), length, device=q.device)[:, None]
        first = 0 if window is None else max(0, int(place[0]) - window + 1)
        position = torch.arange(first, length, device=q.device)
        slots = block_tables[row, position // S].long() * S + position % S
        k = dequantise(keys[slots], scales.k if scales else None).repeat_interleave(H // G, 1)
        v = dequantise(values[slots], scales.v if scales else None).repeat_interleave(H // G, 1)
        scores = torch.einsum("thd,lhd->htl", q[start:end].float(), k) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        hidden = position > place
        if window is not None:
            hidden |= position <= place - window
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        out[start:end] = torch.einsum("htl,lhd->thd", weights, v)
    return out
