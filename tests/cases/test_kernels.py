"""Area e of the public cases: kernels, fp8 and windows, by the CPU's own code.

The same cases for Triton's kernels are in tests/kernels, as test_case_e02 and so on.
"""

import dataclasses

import pytest
import torch

from kernels.cache_addresses import CacheAddresses
from kernels.checks import Scales, check_scale_values
from kernels.copy_blocks import copy_blocks
from kernels.cpu_attention import attend
from kernels.dispatch import Case as Served
from kernels.dispatch import choose
from kernels.reference_attention import quantise
from kernels.store_kv import store_kv
from paged_cases import HEADS, NAN, Case, make_case
from scheduler_svc.core.kv_groups import KvGroup

E4M3 = torch.float8_e4m3fn


def run(case: Case, *, decode: bool) -> torch.Tensor:
    return attend(
        case.q,
        case.k_cache,
        case.v_cache,
        case.block_tables,
        case.seq_lens,
        None if decode else case.query_start_loc,
        case.scale,
        window=case.window,
        scales=case.scales,
        out=torch.full(case.q.shape, NAN).to(case.q.dtype),
    )


@pytest.mark.parametrize("kv_dtype", [torch.float32, E4M3])
@pytest.mark.parametrize("chunk", [1, 7])
def test_case_E_02_nan_in_unused_slots_never_reaches_the_output(
    kv_dtype: torch.dtype, chunk: int
) -> None:
    # Entries behind a table's end are -1 and a block of NaN: `make_case`.
    lengths = [(length, min(length, chunk)) for length in (1, 5, 16, 17, 33)]
    poisoned = make_case(lengths, kv_dtype=kv_dtype, heads=(2, 2))
    clean = make_case(lengths, kv_dtype=kv_dtype, heads=(2, 2), filling=0.0)
    if kv_dtype is E4M3:
        assert (poisoned.k_cache.view(torch.uint8) == 0x7F).any()
    assert poisoned.k_cache.float().isnan().any()
    assert (poisoned.block_tables == -1).any()
    out = run(poisoned, decode=chunk == 1)
    assert out.isfinite().all()
    assert torch.equal(out, run(clean, decode=chunk == 1))
    block = int(poisoned.block_tables[0, 0])
    assert torch.equal(out[0], poisoned.v_cache[block, 0].float())


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 256])
@pytest.mark.parametrize("size", [8, 16, 32])
def test_case_E_04_odd_ratios_and_head_sizes_agree(
    heads: tuple[int, int], head_dim: int, size: int
) -> None:
    longest = 3 * size + 5
    lengths = [(1, 1), (size - 1, 1), (size, 1), (size + 1, 1), (longest, longest)]
    for new, decode in ((lengths, False), ([(length, 1) for length, _ in lengths], True)):
        case = make_case(new, heads=heads, head_dim=head_dim, block_size=size)
        torch.testing.assert_close(run(case, decode=decode), case.expected(), atol=1e-5, rtol=0)


def test_case_E_04_what_is_not_served_is_named_at_start_up() -> None:
    served = Served("cpu", "", torch.float32, torch.float32, 20, 16)
    assert "head_dim is 20" in str(choose(served))
    with pytest.raises(ValueError, match="head_dim is 20"):
        choose(served, "native")


# Value, scale, stored, read back.
ROUNDED = [
    (1000, 1, 448, 448), (-1000, 1, -448, -448), (460, 1, 448, 448), (0.3, 1, 0.3125, 0.3125),
    (17, 1, 16, 16), (19, 1, 20, 20), (0.001, 1, 0.001953125, 0.001953125), (0.0009, 1, 0, 0),
    (1000, 4, 256, 1024), (3.3, 0.1, 32, 3.2), (-7.7, 0.25, -30, -7.5),
]  # fmt: skip


def test_case_E_05_values_are_divided_rounded_to_even_and_clamped() -> None:
    for value, scale, held, read in [*ROUNDED, (NAN, 1, NAN, NAN)]:
        rows = torch.full((1, 1, 64), float(value))
        columns = Scales(*(torch.tensor([float(scale)]) for _ in "kv"))
        cache = torch.zeros(1, 8, 1, 64, dtype=E4M3)
        store_kv(rows, rows, cache, cache.clone(), torch.zeros(1, dtype=torch.int64), columns)
        for stored in (cache[0, 0, 0, 0], quantise(rows, columns.k, E4M3)[0, 0, 0]):
            got = stored.float().item()
            assert got == pytest.approx(held, abs=0, nan_ok=True)
            assert got * scale == pytest.approx(read, rel=1e-6, nan_ok=True)


def test_case_E_05_every_path_reads_with_the_scale() -> None:
    whole = make_case([(30, 30), (17, 17)], kv_dtype=E4M3, scales="tensor")
    whole = dataclasses.replace(whole, scales=Scales(torch.tensor([4.0]), torch.tensor([0.5])))
    expected = whole.expected()
    torch.testing.assert_close(run(whole, decode=False), expected, atol=1e-3, rtol=0)
    for first, last in ((0, 13), (13, 14), (14, 30)):
        chunk = dataclasses.replace(
            whole,
            q=whole.q[first:last],
            block_tables=whole.block_tables[:1],
            seq_lens=torch.tensor([last], dtype=torch.int32),
            query_start_loc=torch.tensor([0, last - first], dtype=torch.int32),
        )
        out = run(chunk, decode=False)
        torch.testing.assert_close(out, expected[first:last], atol=1e-3, rtol=0)
    # A token each: the last of both, from blocks that were copied elsewhere.
    caches = [
        torch.cat([cache, torch.zeros_like(cache)]) for cache in (whole.k_cache, whole.v_cache)
    ]
    half = len(whole.k_cache)
    source = torch.tensor(sorted({*whole.block_tables.flatten().tolist()} - {-1, 1}))
    copy_blocks(CacheAddresses.of(caches), source, source + half)
    tables = torch.where(whole.block_tables > 1, whole.block_tables + half, whole.block_tables)
    ends = dataclasses.replace(
        whole, q=whole.q[[29, 46]], k_cache=caches[0], v_cache=caches[1], block_tables=tables
    )
    torch.testing.assert_close(run(ends, decode=True), expected[[29, 46]], atol=1e-3, rtol=0)


@pytest.mark.parametrize("scale", [0.0, -1.0, NAN, float("inf")])
def test_case_E_05_bad_scales_are_refused(scale: float) -> None:
    with pytest.raises(ValueError, match="must be positive and finite"):
        check_scale_values(Scales(torch.ones(1), torch.tensor([scale])))


@pytest.mark.parametrize("chunk", [12, 3, 1])
def test_case_E_07_a_window_holds_the_token_and_the_three_before_it(chunk: int) -> None:
    size, D, window = 4, 64, 4
    one_hot = torch.eye(D)
    for first in range(0, 12, chunk):
        values = torch.full((4, size, 1, D), NAN)
        for token in range(first + chunk):
            values[1 + token // size, token % size, 0] = one_hot[token]
        # What lies wholly outside the window of the chunk's first token is freed.
        gone = max(0, first - window + 1) // size
        values[1 : 1 + gone] = NAN
        out = attend(
            torch.zeros(chunk, 1, D),
            torch.where(values.isnan(), values, torch.zeros(())),
            values,
            torch.tensor([[1, 2, 3]], dtype=torch.int32),
            torch.tensor([first + chunk], dtype=torch.int32),
            None if chunk == 1 else torch.tensor([0, chunk], dtype=torch.int32),
            1.0,
            window=window,
        )
        for place in range(first, first + chunk):
            seen = one_hot[max(0, place - window + 1) : place + 1]
            assert torch.equal(out[place - first, 0], seen.sum(0) / len(seen))


def test_case_E_07_blocks_outside_the_window_are_not_needed() -> None:
    group = KvGroup(window=4)
    # Token 12 sees 9 to 12: blocks 0 and 1 are unseen, block 2 is not.
    assert group.num_unseen_blocks(12, 4) == 2
    # A hit of eight tokens: token 8 sees 5, 6 and 7, all in block 1.
    assert group.longest_hit([False, True].__getitem__, 2, 4) == 2
    assert group.longest_hit([True, False].__getitem__, 2, 4) == 1
