"""A packed linear layer agrees with a plain one, row by row, however it is called."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from kernels import packed_linear
from kernels.activation import Activation
from kernels.packed_linear import PackedLinear
from kernels.weight_memory import PAGE_BYTES, WeightMemory
from native_variants import drawn, variant, variants
from paged_cases import NAN, assert_rounded_once

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16

dtypes = st.sampled_from([FP32, BF16, FP16])
sizes = st.tuples(st.integers(1, 70), st.integers(1, 70)) | st.sampled_from([(576, 192), (64, 512)])


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
    dtype=dtypes,
    has_bias=st.booleans(),
    gate=st.sampled_from([None, *Activation]),
    seed=st.integers(0, 1000),
)
def test_a_packed_linear_layer_is_a_linear_layer(
    name: str, rows: int, size: tuple[int, int], dtype: torch.dtype, seed: int,
    *, has_bias: bool, gate: Activation | None,
) -> None:  # fmt: skip
    outputs, inputs = size
    height = 2 * outputs if gate else outputs
    weight = drawn(seed, height, inputs, dtype=dtype)
    x = drawn(seed + 1, rows, inputs, dtype=dtype)
    bias = drawn(seed + 2, height, dtype=dtype) if has_bias else None
    layer = PackedLinear(weight, bias, gate=gate, code=variant(name))
    out = torch.full((rows, outputs), NAN, dtype=dtype)
    assert layer(x, out) is out
    assert_rounded_once(out, exact(x, weight, bias, gate=gate))


@variants
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_a_row_is_the_same_alone_and_in_any_batch_on_any_threads(
    name: str, dtype: torch.dtype
) -> None:
    weight, x = drawn(1, 200, 1024, dtype=dtype), drawn(2, 420, 1024, dtype=dtype)
    layer = PackedLinear(weight, code=variant(name))
    all_at_once = layer(x)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(layer(x), all_at_once)
    finally:
        torch.set_num_threads(threads)
    for count in (1, 2, 3, 5, 12, 13, 25, 64, 193):
        for start in (0, 420 - count):
            rows = slice(start, start + count)
            assert torch.equal(layer(x[rows]), all_at_once[rows])


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_rows_of_a_wider_tensor_are_read_and_written_in_place(dtype: torch.dtype) -> None:
    wide, weight = drawn(1, 9, 100, dtype=dtype), drawn(2, 40, 60, dtype=dtype)
    target = torch.full((9, 50), NAN, dtype=dtype)
    PackedLinear(weight)(wide[:, 7:67], target[:, 3:43])
    assert_rounded_once(target[:, 3:43], exact(wide[:, 7:67], weight, None, gate=None))
    assert target[:, :3].isnan().all()
    assert target[:, 43:].isnan().all()


def test_infinity_and_nan_of_one_row_stay_in_it() -> None:
    x, weight = drawn(1, 14, 64, dtype=BF16), drawn(2, 40, 64, dtype=BF16)
    layer = PackedLinear(weight)
    clean = layer(x)
    x[5, 3], x[9, 0] = NAN, float("inf")
    out = layer(x)
    assert out[5].isnan().all()
    assert not out[9].isfinite().any()
    kept = [row for row in range(14) if row not in {5, 9}]
    assert torch.equal(out[kept], clean[kept])


def test_without_native_code_torch_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "native_code", lambda: None)
    weight, x = drawn(1, 40, 24, dtype=FP32), drawn(2, 3, 24, dtype=FP32)
    assert_rounded_once(PackedLinear(weight)(x), exact(x, weight, None, gate=None))
    gated = PackedLinear(weight, weight[:, 0], gate=Activation.SILU)
    assert gated.num_bytes == weight.nbytes
    assert_rounded_once(gated(x), exact(x, weight, weight[:, 0], gate=Activation.SILU))


def test_what_does_not_fit_is_refused() -> None:
    weight = torch.zeros(6, 4)
    layer = PackedLinear(weight)
    with pytest.raises(ValueError, match="x is"):
        layer(torch.zeros(2, 5))
    with pytest.raises(ValueError, match="x is"):
        layer(torch.zeros(2, 4, dtype=BF16))
    with pytest.raises(ValueError, match="each row contiguous"):
        layer(torch.zeros(4, 2).T)
    with pytest.raises(ValueError, match="out is"):
        layer(torch.zeros(2, 4), torch.zeros(2, 5))
    with pytest.raises(ValueError, match="bias is"):
        PackedLinear(weight, torch.zeros(4))
    with pytest.raises(ValueError, match="weight is"):
        PackedLinear(weight[0])
    with pytest.raises(ValueError, match=r"weight is torch\.float64"):
        PackedLinear(weight.double())
    with pytest.raises(ValueError, match="a gated weight is"):
        PackedLinear(weight[:5], gate=Activation.SILU)


def test_memory_of_layers_lies_in_one_chunk_of_whole_pages() -> None:
    memory = WeightMemory(3 * PAGE_BYTES)
    first, second = memory.allocate(100), memory.allocate(PAGE_BYTES)
    assert first.data_ptr() % PAGE_BYTES == 0
    assert second.data_ptr() == first.data_ptr() + 128
    assert not second.any()
    third = memory.allocate(2 * PAGE_BYTES)
    assert third.data_ptr() % PAGE_BYTES == 0
    third.fill_(1)
    assert not first.any()
    assert len(WeightMemory(0).allocate(5)) == 5
    with pytest.raises(ValueError, match="chunk_bytes is -1"):
        WeightMemory(-1)
