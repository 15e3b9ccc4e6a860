"""A cache in lanes holds what one in rows does, block by block, where its docstring says."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cache_layout import LANES, layout, sizes, to_lanes, to_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@given(groups=st.integers(1, 3), G=st.integers(1, 3), D=st.sampled_from([8, 24, 128]))
@settings(max_examples=10)
def test_both_layouts_hold_the_same_keys_and_values_where_they_say(
    dtype: torch.dtype, groups: int, G: int, D: int
) -> None:
    S = groups * LANES
    rows = [torch.randint(0, 256, (3, S, G, D * dtype.itemsize)).to(torch.uint8) for _ in "kv"]
    k, v = (cache.view(dtype) for cache in rows)
    in_lanes = to_lanes(k, v)
    form = layout(3, S, G, D, dtype, in_lanes=True)
    assert (in_lanes[0].shape, in_lanes[1].shape) == (form.k_shape, form.v_shape)
    assert sizes(in_lanes[0]) == (3, S, G, D)
    for mine, expected in zip(to_rows(*in_lanes), rows, strict=True):
        assert torch.equal(mine.view(torch.uint8), expected)
    N, slot, g, word = 2, S - 3, G - 1, D * dtype.itemsize // 4 - 1
    key = in_lanes[0].view(torch.uint8)[N, g, slot // LANES, word, slot % LANES]
    assert torch.equal(key, rows[0][N, slot, g, -4:])
    # A block lies in one piece, so that it is copied whole.
    assert torch.equal(to_rows(*(cache[1:2] for cache in in_lanes))[0].view(torch.uint8),
                       rows[0][1:2])  # fmt: skip


def test_blocks_that_are_no_multiple_of_sixteen_stay_in_rows() -> None:
    assert layout(9, 8, 2, 64, torch.bfloat16, in_lanes=True).k_shape == (9, 8, 2, 64)
    assert layout(9, 16, 2, 64, torch.bfloat16).k_shape == (9, 16, 2, 64)
