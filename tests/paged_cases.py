"""Caches with sequences in them, everything else poisoned: what attention kernels are tried on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.checks import FP8, Scales
from kernels.reference_attention import attention, quantise

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NAN = float("nan")

# Entries behind a sequence's end, in turn: nowhere, and a block of NaN.
BEHIND = (-1, 1)

# Query heads and key/value heads: the ratios of case E-04.
HEADS = [(5, 1), (7, 1), (14, 2), (28, 4), (24, 8), (32, 1), (48, 1), (8, 8), (3, 3)]


@dataclass(frozen=True, slots=True)
class Case:
    """A mixed batch. Block 1 of the cache, and every unused slot, hold NaN."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    scales: Scales | None
    window: int | None
    soft_cap: float | None

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.q.shape[2])

    @property
    def longest(self) -> int:
        return int(self.seq_lens.max())

    @property
    def max_query_len(self) -> int:
        return int(self.query_start_loc.diff().max())

    def expected(self) -> torch.Tensor:
        return attention(
            self.q,
            self.k_cache,
            self.v_cache,
            self.block_tables,
            self.seq_lens,
            self.query_start_loc,
            self.scale,
            window=self.window,
            soft_cap=self.soft_cap,
            scales=self.scales,
        )

    def assert_close(self, out: torch.Tensor) -> None:
        assert_rounded_once(out, self.expected(), weights_rounded=True)


def unwritten(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in which an element that nobody writes shows."""
    return torch.full(tuple(shape), NAN, device=DEVICE).to(dtype)


def assert_rounded_once(
    out: torch.Tensor, exact: torch.Tensor, *, weights_rounded: bool = False
) -> None:
    """Check for one unit in the last place of the output's type, and fp32 noise.

    Half a unit would do on a GPU; Triton's interpreter truncates to bf16. A GPU also rounds the
    weights of a softmax to the type, each by half a unit; the interpreter keeps them in fp32.
    """
    unit = {torch.float32: 0.0, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}[out.dtype]
    size = max(1.0, float(exact.abs().max())) if exact.numel() else 1.0
    noise = 1e-5 * size
    if weights_rounded and out.is_cuda:
        noise += unit / 2 * size
    torch.testing.assert_close(out.float(), exact, rtol=unit, atol=noise)


def make_case(
    lengths: Sequence[tuple[int, int]],
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    scales: str = "none",
    window: int | None = None,
    soft_cap: float | None = None,
    filling: float = NAN,
    seed: int = 0,
) -> Case:
    """Put sequences of (tokens, of them new) into a poisoned cache, in blocks in random order.

    With a window, blocks that no new token sees are given away: their entries lead nowhere.
    """
    generator = torch.Generator().manual_seed(seed)
    (num_heads, G), R = heads, len(lengths)
    kv_dtype = kv_dtype or dtype
    widths = [-(-length // block_size) for length, _ in lengths]
    free = torch.randperm(sum(widths), generator=generator) + 2
    shape = (sum(widths) + 2, block_size, G, head_dim)
    k_cache, v_cache = (torch.full(shape, filling).to(kv_dtype) for _ in range(2))
    tables = torch.tensor(BEHIND, dtype=torch.int32).repeat(R, max(widths) // 2 + 1)
    columns = None
    if kv_dtype in FP8 and scales != "none":
        count = 1 if scales == "tensor" else G
        k_scale, v_scale = torch.rand(2, count, generator=generator) * 2 + 0.25
        columns = Scales(k_scale.to(DEVICE), v_scale.to(DEVICE))
    for row, (length, new) in enumerate(lengths):
        if length == 0:
            continue
        blocks, free = free[: widths[row]], free[widths[row] :]
        place = torch.arange(length)
        slots = blocks[place // block_size] * block_size + place % block_size
        values = torch.randn(2, length, G, head_dim, generator=generator).to(dtype).float()
        for cache, x, name in ((k_cache, values[0], "k"), (v_cache, values[1], "v")):
            scale = None if columns is None else getattr(columns, name).cpu()
            cache.view(-1, G, head_dim)[slots] = quantise(x, scale, kv_dtype)
        first = 0 if window is None else max(0, length - max(new, 1) - window + 1) // block_size
        for gone in blocks[:first].tolist():
            k_cache[gone] = v_cache[gone] = torch.full(shape[1:], NAN).to(kv_dtype)
        tables[row, first : widths[row]] = blocks[first:]
    starts = torch.tensor([0, *(new for _, new in lengths)]).cumsum(0)
    q = torch.randn(int(starts[-1]), num_heads, head_dim, generator=generator).to(dtype)
    return Case(
        q=q.to(DEVICE),
        k_cache=k_cache.to(DEVICE),
        v_cache=v_cache.to(DEVICE),
        block_tables=tables.to(DEVICE),
        seq_lens=torch.tensor([length for length, _ in lengths], dtype=torch.int32).to(DEVICE),
        query_start_loc=starts.int().to(DEVICE),
        scales=columns,
        window=window,
        soft_cap=soft_cap,
    )
