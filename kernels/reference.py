"""What each kernel must compute, in plain torch, with sums in fp32; workers can run on it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from kernels.checks import FP8, Scales
from kernels.reference_attention import dequantise, quantise

# Decoding requests are padded to a common length and attend together, in groups whose keys
# hold at most this many elements: more fall out of the processor's cache. With 16 requests of
# 1,024 tokens, 3 heads of 64: all in one group 6.2 ms, in groups of this size 3.3 ms.
_MAX_GROUP_ELEMENTS = 1 << 20

# Padding below this length costs less than a group more.
_PADDED_FREELY = 128


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scales: Scales | None = None,
) -> None:
    """Write each token's key and value into its slot. A slot of -1 writes nothing.

    Shapes:
        k, v              [T, G, D]     dtype of the cache, or any if that is fp8
        k_cache, v_cache  [N, S, G, D]  contiguous, written in place
        slot_mapping      [T]           int64, block id * S + offset, or -1; no slot twice
        scales            what fp8 values are divided by; 1 if not given

    Raises: ValueError if a shape, layout or dtype is not as above.
    """
    _check_cache(k_cache, v_cache)
    if k.shape != v.shape or k.shape[1:] != k_cache.shape[2:] or k.shape[:1] != slot_mapping.shape:
        raise ValueError(
            f"k {list(k.shape)} and v {list(v.shape)} do not fit a cache of "
            f"{list(k_cache.shape)} and {list(slot_mapping.shape)} slots"
        )
    if slot_mapping.dtype != torch.int64:
        raise ValueError(f"slot_mapping is {slot_mapping.dtype}, must be int64")
    written = slot_mapping >= 0
    if not bool(written.all()):
        slot_mapping, k, v = slot_mapping[written], k[written], v[written]
    if k_cache.dtype in FP8:
        k = quantise(k, None if scales is None else scales.k, k_cache.dtype).view(torch.uint8)
        v = quantise(v, None if scales is None else scales.v, v_cache.dtype).view(torch.uint8)
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    k_cache.view(-1, *k.shape[1:]).index_copy_(0, slot_mapping, k)
    v_cache.view(-1, *v.shape[1:]).index_copy_(0, slot_mapping, v)


@dataclass(frozen=True, slots=True, eq=False)
class DecodeGroup:
    """Requests with one new token each that attend together."""

    tokens: torch.Tensor
    """[r] int64. Their places in the step."""

    slots: torch.Tensor
    """[r * L] int64. Each request's slots; behind its end, its first slot again."""

    mask: torch.Tensor
    """[r, 1, 1, L] fp32. 0 for slots to attend to, -inf for the filling."""


@dataclass(frozen=True, slots=True, eq=False)
class PrefillRun:
    """One request with several new tokens."""

    start: int
    """Place of its first new token in the step."""

    end: int
    """Place behind its last one."""

    slots: torch.Tensor
    """[L] int64. The slots that one of its new tokens sees, their own included."""

    mask: torch.Tensor | None
    """[end - start, L] fp32, causal. None if a token sees all, and none was computed before."""


Reads = tuple[Sequence[DecodeGroup], Sequence[PrefillRun]]


def plan_reads(
    k_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    window: int | None = None,
) -> Reads:
    """Return which slots each request reads: the part of attention that all layers share.

    Shapes: as in `paged_attention`. Of `k_cache`, only the shape matters. With a window W, a token
    sees itself and the W - 1 before it, and no table entry before all of these is read.

    Raises: ValueError if a shape or dtype is not as there.
    """
    _check_requests(block_tables, seq_lens, query_start_loc)
    S, G, D = k_cache.shape[1:]
    starts: list[int] = query_start_loc.tolist()
    lengths: list[int] = seq_lens.tolist()
    decoding: list[int] = []
    prefills: list[PrefillRun] = []
    for row, (start, end, length) in enumerate(zip(starts, starts[1:], lengths, strict=False)):
        if end - start == 1:
            decoding.append(row)
        else:
            prefills.append(_prefill_run(block_tables[row], start, end, length, S, window))
    decoding.sort(key=lengths.__getitem__)
    groups: list[DecodeGroup] = []
    while decoding:
        members = _take_group(decoding, lengths, _MAX_GROUP_ELEMENTS // (G * D))
        rows = torch.tensor(members, device=block_tables.device)
        longest = min(lengths[members[-1]], window or lengths[members[-1]])
        groups.append(_decode_group(rows, longest, block_tables, seq_lens, query_start_loc, S))
    return groups, prefills


def _prefill_run(
    table: torch.Tensor, start: int, end: int, length: int, S: int, window: int | None
) -> PrefillRun:
    num_cached = length - (end - start)
    first = 0 if window is None else max(0, num_cached - window + 1)
    positions = torch.arange(first, length, device=table.device)
    slots = table[positions // S].long() * S + positions % S
    if num_cached == 0 and (window is None or length <= window):
        return PrefillRun(start, end, slots, None)
    queries = torch.arange(num_cached, length, device=table.device)
    hidden = positions > queries[:, None]
    if window is not None:
        hidden |= positions <= queries[:, None] - window
    mask = torch.zeros(hidden.shape, device=table.device).masked_fill_(hidden, -math.inf)
    return PrefillRun(start, end, slots, mask)


def _take_group(decoding: list[int], lengths: Sequence[int], max_tokens: int) -> list[int]:
    """Take the longest of `decoding`, which ascends, and those that may be padded to it."""
    longest = lengths[decoding[-1]]
    shortest = 0 if longest <= _PADDED_FREELY else longest // 2
    first = len(decoding) - 1
    while (
        first
        and lengths[decoding[first - 1]] >= shortest
        and (len(decoding) - first + 1) * longest <= max_tokens
    ):
        first -= 1
    members = decoding[first:]
    del decoding[first:]
    return members


def _decode_group(
    rows: torch.Tensor,
    longest: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    S: int,
) -> DecodeGroup:
    """Return a group whose requests read their latest `longest` slots, or all they have."""
    lengths = seq_lens[rows, None].long()
    firsts = (lengths - longest).clamp_min(0)
    positions = firsts + torch.arange(longest, device=rows.device)
    filling = positions >= lengths  # [r, L]
    # The filling reads a slot that surely was written: 0 * NaN would be NaN.
    positions = torch.where(filling, firsts, positions)
    slots = block_tables[rows[:, None], positions // S].long() * S + positions % S
    mask = torch.zeros(filling.shape, device=rows.device).masked_fill_(filling, -math.inf)
    return DecodeGroup(query_start_loc[rows].long(), slots.view(-1), mask[:, None, None])


def attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    reads: Reads,
    scale: float,
    out: torch.Tensor | None = None,
    scales: Scales | None = None,
) -> torch.Tensor:
    """Return attention of every new token over the slots that `plan_reads` found.

    Shapes: as in `paged_attention`; the cache may be fp8, to be multiplied by `scales`.

    Raises: ValueError if a shape, layout or dtype is not as there.
    """
    _check_cache(k_cache, v_cache)
    H, D = q.shape[1:]
    G = k_cache.shape[2]
    if k_cache.shape[3] != D or H % G or k_cache.dtype not in (q.dtype, *FP8):
        raise ValueError(
            f"q {list(q.shape)} {q.dtype} does not fit a cache of {list(k_cache.shape)} "
            f"{k_cache.dtype}"
        )
    keys, values = k_cache.view(-1, G, D), v_cache.view(-1, G, D)
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_scale, v_scale = (None, None) if scales is None else (scales.k, scales.v)
    groups, prefills = reads
    for group in groups:
        r, L = len(group.tokens), group.mask.shape[-1]
        # The query heads that share a key/value head stand in the place of query tokens.
        shared = functional.scaled_dot_product_attention(
            q[group.tokens].float().view(r, G, H // G, D),
            _take(keys, group.slots, k_scale).view(r, L, G, D).transpose(1, 2),
            _take(values, group.slots, v_scale).view(r, L, G, D).transpose(1, 2),
            attn_mask=group.mask,
            scale=scale,
        )
        out[group.tokens] = shared.reshape(r, H, D).to(out.dtype)
    for run in prefills:
        one = functional.scaled_dot_product_attention(
            q[run.start : run.end].float().transpose(0, 1)[None],
            _take(keys, run.slots, k_scale).transpose(0, 1)[None],
            _take(values, run.slots, v_scale).transpose(0, 1)[None],
            attn_mask=run.mask,
            is_causal=run.mask is None,
            scale=scale,
            enable_gqa=True,
        )
        out[run.start : run.end] = one[0].transpose(0, 1).to(out.dtype)
    return out


def _take(cached: torch.Tensor, slots: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Return the fp32 values of some slots. Shapes: cached [N * S, G, D], slots [L]."""
    return dequantise(cached.index_select(0, slots), scale)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    scale: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return softmax(scale * q @ K.T) @ V for each new token and query head.

    K and V are the keys and values of the token itself and of all before it in its request,
    found through the request's block table; query head h reads key/value head h // (H / G).

    Shapes:
        q, returns        [T, H, D]     request after request
        k_cache, v_cache  [N, S, G, D]  dtype of q, contiguous; the new tokens are stored already
        block_tables      [R, B]        int32; only the first ceil(seq_len / S) entries of a row
                                        are read, and only the slots of its tokens
        seq_lens          [R]           int32, tokens attended to, the new ones included
        query_start_loc   [R + 1]       int32, from 0 to T, rising by at least 1
        out               [T, H, D]     where to write, if given

    Raises: ValueError if a shape, layout or dtype is not as above. Values are not read.
    Numerics: scores and sums in fp32, rounded once to q's dtype. A request's result depends on
        its neighbours by no more than fp32 rounding.
    """
    reads = plan_reads(k_cache, block_tables, seq_lens, query_start_loc)
    return attend(q, k_cache, v_cache, reads, scale, out)


def _check_cache(k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    if k_cache.dim() != 4 or k_cache.shape != v_cache.shape or k_cache.dtype != v_cache.dtype:
        raise ValueError(
            f"k_cache {list(k_cache.shape)} {k_cache.dtype} and v_cache {list(v_cache.shape)} "
            f"{v_cache.dtype} must both be [N, S, G, D] of one dtype"
        )
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("k_cache and v_cache must be contiguous")


def _check_requests(
    block_tables: torch.Tensor, seq_lens: torch.Tensor, query_start_loc: torch.Tensor
) -> None:
    R = seq_lens.shape[0]
    if block_tables.dim() != 2 or block_tables.shape[0] != R or query_start_loc.shape != (R + 1,):
        raise ValueError(
            f"block_tables {list(block_tables.shape)}, seq_lens {list(seq_lens.shape)} and "
            f"query_start_loc {list(query_start_loc.shape)} disagree on the number of requests"
        )
    for name, column in (
        ("block_tables", block_tables),
        ("seq_lens", seq_lens),
        ("query_start_loc", query_start_loc),
    ):
        if column.dtype != torch.int32:
            raise ValueError(f"{name} is {column.dtype}, must be int32")
