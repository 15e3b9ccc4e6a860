"""The references compute plain attention over paged keys and values, and read nothing else."""

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from kernels.reference import paged_attention, store_kv

NAN = float("nan")


@dataclass(frozen=True, slots=True)
class Paged:
    """A cache with sequences in it, and the new tokens at their ends."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.q.shape[2])

    def attention(self) -> torch.Tensor:
        return paged_attention(
            self.q,
            self.k_cache,
            self.v_cache,
            self.block_tables,
            self.seq_lens,
            self.query_start_loc,
            self.scale,
        )

    def dense(self) -> torch.Tensor:
        """Attend by the textbook, one sequence at a time, in float64."""
        out = []
        for row, cached in enumerate(zip(self.keys, self.values, strict=True)):
            start, end = self.query_start_loc[row : row + 2].tolist()
            q, length = self.q[start:end].double(), len(cached[0])
            group = self.q.shape[1] // cached[0].shape[1]
            k, v = (tensor.double().repeat_interleave(group, 1) for tensor in cached)
            scores = torch.einsum("thd,lhd->htl", q, k) * self.scale
            place = torch.arange(length - len(q), length)
            scores.masked_fill_(torch.arange(length) > place[:, None], -math.inf)
            out.append(torch.einsum("htl,lhd->thd", scores.softmax(-1), v))
        return torch.cat(out)


def paged(
    lengths: list[tuple[int, int]],
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 16,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    filling: float = 0.0,
    seed: int = 0,
    order: int = 0,
) -> Paged:
    """Put sequences of (tokens, of them new) into a cache whose other slots hold `filling`.

    Blocks are handed out in random order; table entries past a sequence's end lead to a block
    of nothing but `filling`, or nowhere.
    """
    generator = torch.Generator().manual_seed(seed)
    (num_heads, num_kv_heads), rows = heads, len(lengths)
    widths = [-(-length // block_size) for length, _ in lengths]
    shuffled = torch.randperm(sum(widths), generator=torch.Generator().manual_seed(order)) + 2
    shape = (sum(widths) + 2, block_size, num_kv_heads, head_dim)
    k_cache, v_cache = (torch.full(shape, filling, dtype=dtype) for _ in range(2))
    tables = torch.full((rows, max(widths) + 2), -1, dtype=torch.int32)
    tables[:, -1] = 1
    keys, values, queries = [], [], []
    for row, (length, new) in enumerate(lengths):
        blocks = shuffled[: widths[row]]
        shuffled = shuffled[widths[row] :]
        tables[row, : len(blocks)] = blocks
        k, v = torch.randn(2, length, num_kv_heads, head_dim, generator=generator).to(dtype)
        place = torch.arange(length)
        slots = blocks[place // block_size] * block_size + place % block_size
        store_kv(k, v, k_cache, v_cache, slots)
        keys.append(k)
        values.append(v)
        queries.append(torch.randn(new, num_heads, head_dim, generator=generator).to(dtype))
    starts = torch.tensor([0, *(new for _, new in lengths)]).cumsum(0)
    return Paged(
        q=torch.cat(queries),
        k_cache=k_cache,
        v_cache=v_cache,
        block_tables=tables,
        seq_lens=torch.tensor([length for length, _ in lengths], dtype=torch.int32),
        query_start_loc=starts.int(),
        keys=keys,
        values=values,
    )


@pytest.mark.parametrize("heads", [(5, 1), (7, 1), (14, 2), (28, 4), (24, 8), (48, 1), (3, 3)])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 256])
@pytest.mark.parametrize("block_size", [8, 32])
def test_a_mixed_batch_attends_as_the_textbook_does(
    heads: tuple[int, int], head_dim: int, block_size: int
) -> None:
    size = block_size
    lengths = [(1, 1), (size - 1, 1), (size, size), (size + 1, 3), (3 * size + 5, 1)]
    case = paged(lengths, heads=heads, head_dim=head_dim, block_size=size)
    torch.testing.assert_close(case.attention().double(), case.dense(), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 8), (torch.float16, 11)])
def test_half_precision_is_rounded_once(dtype: torch.dtype, bits: int) -> None:
    case = paged([(40, 1), (3, 3), (70, 30), (7, 1)], dtype=dtype)
    out, exact = case.attention(), case.dense()
    assert out.dtype == dtype
    # Half a unit in the last place, and the fp32 noise that may tip a tie.
    torch.testing.assert_close(out.double(), exact, rtol=2.0**-bits, atol=1e-6)


def test_unused_slots_never_reach_the_result() -> None:
    lengths = [(1, 1), (5, 5), (16, 7), (17, 1), (33, 7), (33, 1)]
    clean, poisoned = paged(lengths), paged(lengths, filling=NAN)
    assert poisoned.k_cache.isnan().any()
    assert torch.equal(clean.attention(), poisoned.attention())


def test_a_token_alone_attends_to_itself_exactly() -> None:
    case = paged([(1, 1), (9, 1)], heads=(2, 2), filling=NAN)
    assert torch.equal(case.attention()[0], case.values[0][0])


def test_the_place_of_blocks_does_not_matter() -> None:
    lengths = [(50, 1), (20, 20), (65, 8), (100, 1)]
    assert torch.equal(paged(lengths, order=1).attention(), paged(lengths, order=2).attention())


def test_chunks_give_what_the_whole_gives() -> None:
    whole = paged([(40, 40)])
    for first, last in ((0, 13), (13, 14), (14, 40)):
        chunk = paged_attention(
            whole.q[first:last],
            whole.k_cache,
            whole.v_cache,
            whole.block_tables,
            torch.tensor([last], dtype=torch.int32),
            torch.tensor([0, last - first], dtype=torch.int32),
            whole.scale,
        )
        torch.testing.assert_close(chunk, whole.attention()[first:last], atol=1e-6, rtol=1e-6)


def test_a_neighbour_changes_no_more_than_rounding() -> None:
    lengths = [(7, 1), (300, 1), (20, 20), (1500, 1), (290, 1), (129, 1), (1, 1), (1400, 1)]
    together = paged(lengths)
    out = together.attention()
    for row in range(len(lengths)):
        start, end = together.query_start_loc[row : row + 2].tolist()
        alone = paged_attention(
            together.q[start:end],
            together.k_cache,
            together.v_cache,
            together.block_tables[row : row + 1],
            together.seq_lens[row : row + 1],
            torch.tensor([0, end - start], dtype=torch.int32),
            together.scale,
        )
        torch.testing.assert_close(alone, out[start:end], atol=1e-6, rtol=1e-6)


def test_the_result_goes_where_it_is_wanted() -> None:
    case = paged([(9, 1), (4, 4)])
    out = torch.empty_like(case.q)
    given = paged_attention(
        case.q,
        case.k_cache,
        case.v_cache,
        case.block_tables,
        case.seq_lens,
        case.query_start_loc,
        case.scale,
        out,
    )
    assert given is out
    assert torch.equal(out, case.attention())


def test_a_slot_of_minus_one_writes_nothing() -> None:
    k, v = torch.randn(2, 3, 2, 4)
    k_cache, v_cache = torch.zeros(2, 3, 4, 2, 4)
    store_kv(k, v, k_cache, v_cache, torch.tensor([5, -1, 11]))
    for new, cache in ((k, k_cache), (v, v_cache)):
        assert torch.equal(cache[1, 1], new[0])
        assert torch.equal(cache[2, 3], new[2])
        cache[1, 1] = cache[2, 3] = 0
        assert not cache.any()


def test_what_does_not_fit_together_is_refused() -> None:
    case = paged([(9, 1), (4, 4)])
    k, v = torch.randn(2, 3, 2, 16)
    slots = torch.tensor([16, 17, 18])
    with pytest.raises(ValueError, match="slots"):
        store_kv(k, v, case.k_cache, case.v_cache, slots[:2])
    with pytest.raises(ValueError, match="int64"):
        store_kv(k, v, case.k_cache, case.v_cache, slots.int())
    with pytest.raises(ValueError, match="contiguous"):
        store_kv(k, v, case.k_cache.mT, case.v_cache.mT, slots)
    with pytest.raises(ValueError, match="one dtype"):
        store_kv(k, v, case.k_cache, case.v_cache.half(), slots)
    changes: list[dict[str, Any]] = [
        {"q": case.q.half()},
        {"q": case.q[..., :8]},
        {"q": case.q[:, :3]},
        {"seq_lens": case.seq_lens[:1]},
        {"block_tables": case.block_tables.long()},
    ]
    for change in changes:
        broken = replace(case, **change)
        with pytest.raises(ValueError, match=r"fit|int32|disagree"):
            broken.attention()
