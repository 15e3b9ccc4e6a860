"""A quantised linear layer computes what its values stand for, on inputs of 8 bits."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn import functional

from kernels import quantised_linear
from kernels.activation import Activation
from kernels.quantised_linear import (
    QuantisedLinear,
    QuantisedWeight,
    quantise,
    quantise_in_torch,
)
from kernels.reference_quantised import GROUP, round_rows
from native_variants import drawn, variant, variants
from paged_cases import NAN, assert_rounded_once

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16

sizes = st.tuples(st.integers(1, 70), st.integers(1, 100)) | st.sampled_from([(96, 576)])
bits_of = pytest.mark.parametrize("bits", [4, 8])


def some_weight(
    seed: int, rows: int, columns: int, bits: int, *, has_minimums: bool, in_half: bool
) -> QuantisedWeight:
    """Any values, and scales that make weights of about 1."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 1 << bits, (rows, columns), generator=generator).to(torch.uint8)
    shape = (rows, -(-columns // GROUP))
    scales = torch.rand(shape, generator=generator) * 4 / (1 << bits)
    minimums = torch.randn(shape, generator=generator)
    if in_half:
        scales, minimums = scales.half().float(), minimums.half().float()
    if has_minimums:
        return QuantisedWeight(bits, values, scales, minimums)
    return QuantisedWeight(bits, values, scales, zero_point=1 << (bits - 1))


def exact(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, gate: Activation | None
) -> torch.Tensor:
    product = x.double() @ weight.double().T
    if bias is not None:
        product += bias.double()
    if gate is None:
        return product.float()
    gates, up = product.chunk(2, dim=-1)
    if gate is Activation.GELU:
        return (functional.gelu(gates, approximate="tanh") * up).float()
    return (functional.silu(gates) * up).float()


@variants
@settings(max_examples=50)
@given(
    rows=st.integers(0, 70),
    size=sizes,
    bits=st.sampled_from([4, 8]),
    dtype=st.sampled_from([FP32, BF16, FP16]),
    has_minimums=st.booleans(),
    in_half=st.booleans(),
    has_bias=st.booleans(),
    gate=st.sampled_from([None, *Activation]),
    seed=st.integers(0, 1000),
)
def test_results_are_products_of_dequantised_weights_and_rounded_inputs(
    name: str, rows: int, size: tuple[int, int], bits: int, dtype: torch.dtype, seed: int,
    *, has_minimums: bool, in_half: bool, has_bias: bool, gate: Activation | None,
) -> None:  # fmt: skip
    outputs, inputs = size
    height = 2 * outputs if gate else outputs
    weight = some_weight(seed, height, inputs, bits, has_minimums=has_minimums, in_half=in_half)
    x = drawn(seed + 1, rows, inputs, dtype=dtype)
    bias = drawn(seed + 2, height, dtype=dtype) if has_bias else None
    layer = QuantisedLinear(weight, bias, dtype=dtype, gate=gate, code=variant(name))
    out = torch.full((rows, outputs), NAN, dtype=dtype)
    assert layer(x, out) is out
    assert_rounded_once(out, exact(round_rows(x), weight.dequantise(), bias, gate=gate))


@variants
@bits_of
def test_a_row_is_the_same_alone_and_in_any_batch_on_any_threads(name: str, bits: int) -> None:
    weight = some_weight(1, 200, 1056, bits, has_minimums=bits == 4, in_half=True)
    x = drawn(2, 420, 1056, dtype=BF16)
    layer = QuantisedLinear(weight, dtype=BF16, code=variant(name))
    all_at_once = layer(x)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(layer(x), all_at_once)
    finally:
        torch.set_num_threads(threads)
    for count in (1, 2, 3, 5, 6, 7, 13, 64, 193):
        for start in (0, 420 - count):
            rows = slice(start, start + count)
            assert torch.equal(layer(x[rows]), all_at_once[rows])


@bits_of
def test_the_error_of_rounded_inputs_is_within_the_bound_of_the_docstring(bits: int) -> None:
    weight = some_weight(1, 64, 256, bits, has_minimums=True, in_half=True)
    x = drawn(2, 40, 256, dtype=FP32) * torch.logspace(-2, 2, 256)
    out = QuantisedLinear(weight, dtype=FP32)(x)
    full = weight.dequantise()
    largest = x.view(40, -1, GROUP).abs().amax(-1).repeat_interleave(GROUP, 1)
    bound = (largest / 254).double() @ full.abs().double().T
    error = (out.double() - x.double() @ full.double().T).abs()
    assert (error <= bound * 1.0001 + 1e-3).all()
    assert error.max() > bound.max() / 100  # else nothing was rounded


def test_infinity_and_nan_make_nan_of_their_row_alone() -> None:
    x = drawn(1, 14, 64, dtype=BF16)
    weight = some_weight(1, 40, 64, 4, has_minimums=True, in_half=True)
    layer = QuantisedLinear(weight, dtype=BF16)
    clean = layer(x)
    x[5, 3], x[9, 40] = NAN, float("inf")
    out = layer(x)
    assert out[[5, 9]].isnan().all()
    kept = [row for row in range(14) if row not in {5, 9}]
    assert torch.equal(out[kept], clean[kept])


@bits_of
@settings(max_examples=40)
@example(size=(1, 1), seed=541, scale=1e-3)
@given(size=sizes, seed=st.integers(0, 1000), scale=st.sampled_from([0.0, 1e-3, 1.0, 300.0]))
def test_quantising_is_off_by_half_a_scale_at_most(
    bits: int, size: tuple[int, int], seed: int, scale: float
) -> None:
    weight = drawn(seed, *size, dtype=FP32) * scale
    quantised = quantise(weight, bits)
    quantised.check()
    each = quantised.scales.repeat_interleave(GROUP, 1)[:, : size[1]]
    # Of scales in fp16 the last bit; of those below its normal numbers half of 2 ** -24, as often
    # as a value says, and of a minimum once.
    most = weight.abs().max()
    allowed = each / 2 + most * 2**-9 + (2**bits + 1) * 2**-25
    assert ((quantised.dequantise() - weight).abs() <= allowed).all()


@bits_of
def test_values_on_the_grid_stay_where_they_are(bits: int) -> None:
    weight = some_weight(3, 8, 64, bits, has_minimums=bits == 4, in_half=True)
    least = 0 if bits == 4 else 1
    weight.values.clamp_(min=least)
    weight.values[:, ::32], weight.values[:, 1::32] = least, (1 << bits) - 1
    again = quantise(weight.dequantise(), bits)
    torch.testing.assert_close(again.dequantise(), weight.dequantise(), rtol=2e-3, atol=2e-3)
    assert torch.equal(again.values, weight.values)


@bits_of
def test_packed_weights_take_the_bytes_of_the_docstring(bits: int) -> None:
    weight = some_weight(1, 64, 320, bits, has_minimums=bits == 4, in_half=True)
    layer = QuantisedLinear(weight, dtype=BF16)
    assert layer.num_bytes == 64 * 320 * {4: 0.625, 8: 1.0625}[bits]


def test_without_native_code_torch_computes_with_dequantised_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quantised_linear, "native_code", lambda: None)
    weight = some_weight(1, 40, 24, 4, has_minimums=True, in_half=True)
    x = drawn(2, 3, 24, dtype=FP32)
    for gate in (None, *Activation):
        out = QuantisedLinear(weight, dtype=FP32, gate=gate)(x)
        assert_rounded_once(out, exact(x, weight.dequantise(), None, gate))


def test_what_does_not_fit_is_refused() -> None:
    values, scales = torch.zeros(6, 40, dtype=torch.uint8), torch.zeros(6, 2)
    for weight, message in (
        (QuantisedWeight(5, values, scales), "bits is 5, must be 4 or 8"),
        (QuantisedWeight(4, values + 16, scales), "values go up to 16, must be below 16"),
        (QuantisedWeight(4, values.float(), scales), "must be .O, I. uint8"),
        (QuantisedWeight(4, values, scales[:, :1]), r"scales is \[6, 1\], must be \[6, 2\]"),
        (QuantisedWeight(4, values, scales, scales[1:]), r"minimums is \[5, 2\]"),
        (QuantisedWeight(4, values, scales, zero_point=16), "zero_point is 16, must be below 16"),
    ):
        with pytest.raises(ValueError, match=message):
            QuantisedLinear(weight, dtype=FP32)
    weight = QuantisedWeight(8, values, scales, zero_point=128)
    with pytest.raises(ValueError, match=r"dtype is torch\.float64"):
        QuantisedLinear(weight, dtype=torch.float64)
    with pytest.raises(ValueError, match="bias is"):
        QuantisedLinear(weight, torch.zeros(5), dtype=FP32)
    with pytest.raises(ValueError, match="x is"):
        QuantisedLinear(weight, dtype=FP32)(torch.zeros(2, 41))
    with pytest.raises(ValueError, match="bits is 3"):
        quantise(torch.zeros(2, 2), 3)


@variants
@settings(max_examples=50)
@given(
    size=sizes,
    bits=st.sampled_from([4, 8]),
    scale=st.sampled_from([1e-9, 1e-3, 1.0, 1e4, 1e9]),
    specials=st.lists(st.sampled_from([0.0, -0.0, float("inf"), -float("inf"), NAN]), max_size=4),
    seed=st.integers(0, 1000),
)
def test_native_code_rounds_weights_as_torch_does(
    name: str, size: tuple[int, int], bits: int, scale: float, specials: list[float], seed: int
) -> None:
    weight = drawn(seed, *size, dtype=FP32) * scale
    weight.view(-1)[: len(specials)] = torch.tensor(specials)[: weight.numel()]
    found, expected = quantise(weight, bits, variant(name)), quantise_in_torch(weight, bits)
    assert (found.bits, found.zero_point) == (expected.bits, expected.zero_point)
    is_nan = expected.scales.isnan()
    assert torch.equal(found.scales.isnan(), is_nan)
    assert torch.equal(found.scales[~is_nan], expected.scales[~is_nan])
    of_numbers = ~is_nan.repeat_interleave(GROUP, 1)[:, : size[1]]
    assert torch.equal(found.values[of_numbers], expected.values[of_numbers])
    if expected.minimums is None or found.minimums is None:
        assert found.minimums is expected.minimums
    else:
        assert torch.equal(found.minimums.isnan(), is_nan)
        assert torch.equal(found.minimums[~is_nan], expected.minimums[~is_nan])
