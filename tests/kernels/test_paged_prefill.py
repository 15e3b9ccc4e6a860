"""New tokens attend to all before them, in one launch for any mix of long and single ones."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import cost
from kernels.paged_prefill import count_rows, paged_prefill
from kernels.tuned import target_of, tile_of
from load_counter import count_bytes
from paged_cases import DEVICE, HEADS, Case, make_case, unwritten

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
interpreted = pytest.mark.skipif(DEVICE.type == "cuda", reason="counts loads of the interpreter")


def prefill(case: Case) -> torch.Tensor:
    out = paged_prefill(
        case.q,
        case.k_cache,
        case.v_cache,
        case.block_tables,
        case.seq_lens,
        case.query_start_loc,
        case.scale,
        case.max_query_len,
        window=case.window,
        soft_cap=case.soft_cap,
        scales=case.scales,
        out=unwritten(case.q.shape, case.q.dtype),
    )
    assert not out.isnan().any()
    return out


@st.composite
def cases(draw: st.DrawFn) -> Case:
    block_size = draw(st.sampled_from([8, 16, 32]))
    lengths = draw(
        st.lists(
            st.integers(1, 3 * block_size).flatmap(
                lambda length: st.tuples(
                    st.just(length), st.sampled_from([0, 1, length, (length + 1) // 2])
                )
            ),
            min_size=1,
            max_size=4,
        ).filter(lambda drawn: any(new for _, new in drawn))
    )
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    return make_case(
        lengths,
        heads=draw(st.sampled_from([(4, 2), (5, 1), (7, 1), (3, 3), (12, 2)])),
        head_dim=draw(st.sampled_from([64, 80, 96, 112, 128, 256])),
        block_size=block_size,
        dtype=dtype,
        kv_dtype=draw(st.sampled_from([dtype, dtype, E4M3, E5M2])),
        scales=draw(st.sampled_from(["none", "tensor", "head"])),
        window=draw(st.none() | st.integers(1, 40)),
        soft_cap=draw(st.none() | st.sampled_from([0.5, 30.0])),
        seed=draw(st.integers(0, 1000)),
    )


@settings(max_examples=10)
@given(case=cases())
def test_any_mixed_batch_agrees_with_dense_attention(case: Case) -> None:
    case.assert_close(prefill(case))


@pytest.mark.slow
@settings(max_examples=300)
@given(case=cases())
def test_any_mixed_batch_agrees_with_dense_attention_many_times(case: Case) -> None:
    case.assert_close(prefill(case))


@pytest.mark.slow
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 256])
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_case_e04_every_ratio_and_head_size_agrees(
    heads: tuple[int, int], head_dim: int, block_size: int
) -> None:
    size = block_size
    lengths = [(1, 1), (size - 1, 1), (size, size), (size + 1, 3), (3 * size + 5, 1)]
    case = make_case(lengths, heads=heads, head_dim=head_dim, block_size=size)
    torch.testing.assert_close(prefill(case), case.expected(), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("heads", "head_dim"), [((5, 1), 80), ((48, 1), 64), ((14, 2), 112)])
def test_case_e04_odd_ratios_and_head_sizes_agree(heads: tuple[int, int], head_dim: int) -> None:
    case = make_case([(1, 1), (7, 1), (8, 8), (9, 3)], heads=heads, head_dim=head_dim, block_size=8)
    torch.testing.assert_close(prefill(case), case.expected(), atol=1e-5, rtol=0)


def test_case_e02_unused_slots_never_reach_the_result() -> None:
    lengths = [(1, 1), (5, 5), (16, 7), (17, 7), (33, 7)]
    poisoned = make_case(lengths, heads=(2, 2))
    out = prefill(poisoned)
    assert out.isfinite().all()
    assert torch.equal(out, prefill(make_case(lengths, heads=(2, 2), filling=0.0)))
    block = int(poisoned.block_tables[0, 0])
    assert torch.equal(out[0], poisoned.v_cache[block, 0])


def test_case_e05_fp8_is_scaled_in_whole_and_chunked_prefill() -> None:
    whole = make_case([(30, 30)], kv_dtype=E4M3, scales="tensor")
    assert whole.scales is not None
    scales = dataclasses.replace(whole.scales, k=whole.scales.k * 0 + 4, v=whole.scales.v * 0 + 0.5)
    whole = dataclasses.replace(whole, scales=scales)
    expected = whole.expected()
    torch.testing.assert_close(prefill(whole), expected, atol=1e-3, rtol=0)
    for first, last in ((0, 13), (13, 14), (14, 30)):
        chunk = dataclasses.replace(
            whole,
            q=whole.q[first:last],
            seq_lens=torch.tensor([last], dtype=torch.int32, device=DEVICE),
            query_start_loc=torch.tensor([0, last - first], dtype=torch.int32, device=DEVICE),
        )
        torch.testing.assert_close(prefill(chunk), expected[first:last], atol=1e-3, rtol=0)


@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2])
@pytest.mark.parametrize("scales", ["none", "tensor", "head"])
def test_fp8_of_every_kind_is_scaled(kv_dtype: torch.dtype, scales: str) -> None:
    case = make_case([(37, 9), (5, 1)], heads=(6, 3), kv_dtype=kv_dtype, scales=scales)
    case.assert_close(prefill(case))


@pytest.mark.parametrize("chunk", [12, 3])
def test_case_e07_windows_in_whole_and_in_chunks(chunk: int) -> None:
    D, W = 64, 4
    eye = torch.eye(D, device=DEVICE)
    keys = torch.zeros(4, 8, 1, D, device=DEVICE)
    values = torch.full((4, 8, 1, D), float("nan"), device=DEVICE)
    values[2, :, 0], values[3, :4, 0] = eye[:8], eye[8:12]
    for first in range(0, 12, chunk):
        # A block that lies wholly outside the window is gone.
        gone = max(0, first - W + 1) // 8
        table = [1] * gone + [2, 3][gone:]
        out = paged_prefill(
            torch.zeros(chunk, 1, D, device=DEVICE),
            keys,
            values,
            torch.tensor([table], dtype=torch.int32, device=DEVICE),
            torch.tensor([first + chunk], dtype=torch.int32, device=DEVICE),
            torch.tensor([0, chunk], dtype=torch.int32, device=DEVICE),
            1.0,
            chunk,
            window=W,
        )
        for place in range(first, first + chunk):
            seen = eye[max(0, place - W + 1) : place + 1]
            assert torch.equal(out[place - first, 0], seen.sum(0) / len(seen))


def test_tokens_behind_the_last_request_are_not_written() -> None:
    case = make_case([(20, 5), (3, 3)])
    padded = dataclasses.replace(case, q=torch.cat([case.q, case.q[:4]]))
    out = unwritten(padded.q.shape, torch.float32)
    paged_prefill(padded.q, case.k_cache, case.v_cache, case.block_tables, case.seq_lens,
                  case.query_start_loc, case.scale, 5, out=out)  # fmt: skip
    case.assert_close(out[:8])
    assert out[8:].isnan().all()


@interpreted
@pytest.mark.parametrize("window", [None, 9])
def test_each_tile_reads_what_its_tokens_see_exactly_once(window: int | None) -> None:
    requests = [(70, 40), (33, 1), (20, 20)]
    case = make_case(requests, heads=(6, 2), window=window)
    heads = cost.Heads(6, 2, 64, 4, 4)
    tile = tile_of("paged_prefill", target_of(DEVICE), 64, torch.float32, torch.float32)
    with count_bytes(k=case.k_cache, v=case.v_cache, q=case.q, out=case.q) as touched:
        prefill(case)
    rows = count_rows(tile.rows, 3, 40)
    expected = cost.prefill_kv_bytes(requests, heads, rows, window)
    assert touched.read["k"] + touched.read["v"] == expected
    assert touched.read["q"] == len(case.q) * heads.q_bytes
