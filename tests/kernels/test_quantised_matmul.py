"""Products with weights of few bits are those of the weights they stand for, rounded once."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import cost, reference_quantised
from kernels.kept_weight import BITS, GROUPS, ZEROS, Form, KeptWeight, group_of, lay_out
from kernels.quantised_matmul import quantised_matmul
from kernels.tuned import MatmulTile, Target, matmul_tile, target_of
from load_counter import count_bytes
from paged_cases import DEVICE, NAN, assert_rounded_once

forms = st.sampled_from(list(BITS))
groups = st.sampled_from([0, *GROUPS])
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
TARGETS = [
    Target("sm_80", 108), Target("sm_90", 132), Target("sm_100", 148), Target("gfx942", 304)
]  # fmt: skip


def make_weight(
    form: Form, shape: tuple[int, int], group: int, zero: str = "many"
) -> tuple[KeptWeight, torch.Tensor]:
    """Return random values in words, and what they stand for [O, I]."""
    rows, columns = shape
    num_groups = -(-columns // group) if group else 1
    scales = (torch.rand(rows, num_groups) / 8).half().float()
    each = scales.repeat_interleave(group or columns, 1)[:, :columns]
    if form == "e4m3":
        values = torch.randn(shape).to(torch.float8_e4m3fn)
        kept = lay_out(form, values.view(torch.uint8), scales, group=group)
        return kept, values.float() * each
    values = torch.randint(0, 1 << BITS[form], shape, dtype=torch.uint8)
    zeros = torch.randint(0, ZEROS[form], (rows, num_groups)).float()
    if zero == "one":
        zeros.fill_(ZEROS[form] // 2)
    spread = zeros.repeat_interleave(group or columns, 1)[:, :columns]
    return lay_out(form, values, scales, zeros, group=group), (values.float() - spread) * each


@settings(max_examples=24)
@given(
    form=forms,
    group=groups,
    dtype=dtypes,
    tokens=st.sampled_from([0, 1, 3, 16, 19]),
    shape=st.sampled_from([(1, 16), (20, 100), (40, 128), (16, 300), (33, 256)]),
    zero=st.sampled_from(["one", "many"]),
    has_bias=st.booleans(),
)
def test_products_are_those_of_the_weights_the_values_stand_for(
    form: Form, group: int, dtype: torch.dtype, tokens: int, shape: tuple[int, int], zero: str, *,
    has_bias: bool,
) -> None:  # fmt: skip
    weight, dense = make_weight(form, shape, group, zero)
    weight, dense = weight.to(DEVICE), dense.to(DEVICE)
    rows, columns = shape
    # Rows lie apart, in x as in what is written; what is beside them is never touched.
    x = torch.full((tokens, columns + 8), NAN, device=DEVICE).to(dtype)
    x[:, :columns] = torch.randn(tokens, columns, device=DEVICE)
    bias = torch.randn(rows, device=DEVICE).to(dtype) if has_bias else None
    around = torch.full((tokens + 2, rows + 8), NAN, device=DEVICE).to(dtype)
    out = quantised_matmul(x[:, :columns], weight, bias, out=around[:tokens, :rows])
    assert_rounded_once(out, reference_quantised.quantised_matmul(x[:, :columns], weight, bias))
    assert around[tokens:].isnan().all()
    assert around[:, rows:].isnan().all()
    expected = x[:, :columns].float() @ dense.T + (0 if bias is None else bias.float())
    assert_rounded_once(out, expected)


@given(form=forms, group=groups, rows=st.integers(1, 5), columns=st.integers(1, 300))
def test_words_hold_every_value(form: Form, group: int, rows: int, columns: int) -> None:
    weight, dense = make_weight(form, (rows, columns), group)
    assert torch.equal(reference_quantised.kept_weight(weight), dense)
    assert weight.scales.dtype == torch.float16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["int4", "int8"])
def test_every_value_less_every_zero_point_is_exact(form: Form, dtype: torch.dtype) -> None:
    count = 1 << BITS[form]
    values = torch.arange(count, dtype=torch.uint8).repeat(16, 1)
    zeros = torch.linspace(0, count - 1, 16).round()[:, None]
    weight = lay_out(form, values, torch.ones(16, 1), zeros).to(DEVICE)
    out = quantised_matmul(torch.eye(count, device=DEVICE).to(dtype), weight)
    assert torch.equal(out.T.float().cpu(), values.float() - zeros)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_number_of_e4m3_is_exact(dtype: torch.dtype) -> None:
    values = torch.arange(256, dtype=torch.uint8)
    values = values[(values & 0x7F) != 0x7F][None]
    weight = lay_out("e4m3", values, torch.ones(1, 1)).to(DEVICE)
    x = torch.eye(values.shape[1], device=DEVICE).to(dtype)
    found = quantised_matmul(x, weight)[:, 0].float().cpu()
    assert torch.equal(found, values[0].view(torch.float8_e4m3fn).float())


@pytest.mark.skipif(DEVICE.type == "cuda", reason="only the interpreter's loads can be counted")
@pytest.mark.parametrize(("form", "group"), [("int4", 128), ("int4", 32), ("int8", 64)])
def test_as_many_bytes_are_touched_as_the_cost_says(form: Form, group: int) -> None:
    weight, _ = make_weight(form, (40, 300), group)
    x = torch.randn(20, 300).bfloat16()
    out = torch.empty(20, 40, dtype=torch.bfloat16)
    tile = matmul_tile(
        target_of(DEVICE), 20, 40, len(weight.words), group, bits=BITS[form], dtype=x.dtype
    )
    assert weight.zeros is not None
    with count_bytes(
        x=x, words=weight.words, scales=weight.scales, zeros=weight.zeros, out=out
    ) as touched:
        quantised_matmul(x, weight, out=out)
    found = sum(touched.read.values()) + sum(touched.written.values())
    assert found == cost.quantised_matmul_bytes(20, 40, 300, 2, weight.num_bytes, tile)
    assert touched.written["?"] == touched.read["?"] == tile.splits * 20 * 40 * 4


@given(
    target=st.sampled_from(TARGETS),
    tokens=st.integers(1, 9000),
    outputs=st.integers(1, 150000),
    panels=st.integers(1, 300),
    group=groups,
    bits=st.sampled_from([4, 8]),
    dtype=dtypes,
)
def test_a_tile_covers_what_there_is_and_splits_only_long_sums(
    target: Target, tokens: int, outputs: int, panels: int, group: int, bits: int,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    tile = matmul_tile(target, tokens, outputs, panels, group, bits=bits, dtype=dtype)
    for size in (tile.rows, tile.columns, tile.num_warps):
        assert size & (size - 1) == 0
    assert 16 <= tile.rows <= 128
    # The next smaller tile would not hold them.
    assert tile.rows == 16 or tokens > tile.rows // 2
    assert 1 <= tile.splits <= max(1, panels // 4)
    programs = -(-tokens // tile.rows) * -(-outputs // tile.columns)
    # Another split would be one wave more than is wanted.
    assert tile.splits == 1 or programs * (tile.splits - 1) < 2 * target.num_processors


def test_decoding_fills_an_h200_and_prefill_is_not_split() -> None:
    shape = {"num_outputs": 4096, "num_panels": 32, "group": 128, "bits": 4}
    h200, dtype = Target("sm_90", 132), torch.bfloat16
    assert matmul_tile(h200, 1, **shape, dtype=dtype) == MatmulTile(16, 128, 8, 4, 4)
    assert matmul_tile(h200, 4096, **shape, dtype=dtype) == MatmulTile(128, 128, 1, 8, 3)


def test_groups_are_told_from_places() -> None:
    each = torch.arange(256)
    assert group_of(each // 128) == 128
    assert group_of(each // 256) == 0
    # Groups of 128 of which a rank has the second half of the first.
    assert group_of((each + 64) // 128) == 64
    assert group_of(each // 16) == 16
    assert group_of(each[:100] // 64) == 64
    assert group_of(each // 8) is None
    assert group_of(each // 40) is None


def test_scales_are_narrow_where_that_is_exact() -> None:
    values = torch.zeros(1, 32, dtype=torch.uint8)
    for scale, dtype in ((0.5, torch.float16), (2.0**-30, torch.bfloat16), (0.1, torch.float32)):
        weight = lay_out("int8", values, torch.tensor([[scale]]), torch.tensor([[128.0]]))
        assert weight.scales.dtype == dtype
        assert float(weight.scales) == pytest.approx(scale, abs=0, rel=1e-7)


def test_what_cannot_be_laid_out_is_named() -> None:
    values, ones = torch.full((2, 32), 16, dtype=torch.uint8), torch.ones(2, 1)
    with pytest.raises(ValueError, match="values go up to 16, must be below 16"):
        lay_out("int4", values, ones)
    with pytest.raises(ValueError, match="group is 24, must be 0 or one of"):
        lay_out("int8", values, ones, group=24)
    with pytest.raises(ValueError, match=r"scales is \[2, 1\] .*must be \[2, 2\]"):
        lay_out("int8", values, ones, group=16)
    for zero in (256.0, -1.0, 0.5):
        with pytest.raises(ValueError, match=f"zeros has {zero}, must be whole, 0 to 255"):
            lay_out("int8", values, ones, torch.tensor([[1.0], [zero]]))
    with pytest.raises(ValueError, match="zeros are given, must be none with e4m3"):
        lay_out("e4m3", values, ones, ones)
    values[1, 3] = 0xFF
    with pytest.raises(ValueError, match="values has NaN among its e4m3"):
        lay_out("e4m3", values, ones)


def test_claims_of_the_docstring_are_checked() -> None:
    weight = make_weight("int4", (24, 64), 32)[0].to(DEVICE)
    x = torch.zeros(3, 64, device=DEVICE)
    with pytest.raises(ValueError, match=r"x is \[3, 63\] .*must be \[T, 64\]"):
        quantised_matmul(x[:, 1:], weight)
    with pytest.raises(ValueError, match=r"x is .*float64"):
        quantised_matmul(x.double(), weight)
    with pytest.raises(ValueError, match=r"bias is \[3\] .*must be \[24\]"):
        quantised_matmul(x, weight, x[:, 0])
    with pytest.raises(ValueError, match=r"out is \[3, 64\] .*must be \[3, 24\]"):
        quantised_matmul(x, weight, out=x)
    with pytest.raises(ValueError, match="each token of x must be contiguous"):
        quantised_matmul(torch.zeros(64, 3, device=DEVICE).T, weight)
