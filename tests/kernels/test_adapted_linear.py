"""A layer adds each token's own adapter, as if its weight were changed, and no other's."""

import ctypes
import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from kernels import packed_linear
from kernels.activation import Activation
from kernels.adapted_linear import AdaptedLinear, AdaptedTokens
from kernels.cpu_build import native_code
from kernels.low_rank import LowRankPart, PackedAdapter, packed_bytes
from kernels.packed_linear import PackedLinear
from kernels.quantised_linear import QuantisedLinear, quantise
from native_variants import drawn, variant, variants
from paged_cases import NAN, assert_rounded_once

pytestmark = pytest.mark.skipif(native_code() is None, reason="this machine compiles no C++")

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
# Of the matrices of a layer, in the order of their rows.
Ranks = tuple[int, ...]
ranks = st.sampled_from([0, 0, 1, 2, 5, 16, 17, 64])
outputs_of_parts = st.lists(st.integers(1, 40), min_size=1, max_size=3)


class Case:
    """A layer of some matrices, gated if there is a gate, and adapters that change some of them."""

    def __init__(
        self,
        parts: list[int],
        inputs: int,
        dtype: torch.dtype,
        adapters: list[Ranks],
        *,
        gate: Activation | None = None,
        bits: int | None = None,
        seed: int = 0,
        code: ctypes.CDLL | None = None,
    ) -> None:
        code = code or native_code()
        assert code is not None
        self.dtype, self.gate, rows = dtype, gate, sum(parts)
        scale = inputs**-0.5
        self.weight = (drawn(seed, rows, inputs, dtype=FP32) * scale).to(dtype)
        self.bias = drawn(seed + 1, rows, dtype=dtype)
        self.plain: PackedLinear | QuantisedLinear
        if bits is None:
            self.plain = PackedLinear(self.weight, self.bias, gate=gate, code=code)
        else:
            rounded = quantise(self.weight, bits)
            self.ungated = QuantisedLinear(rounded, self.bias, dtype=dtype, code=code)
            self.plain = QuantisedLinear(rounded, self.bias, dtype=dtype, gate=gate, code=code)
        self.tokens = AdaptedTokens()
        self.layer = AdaptedLinear(self.plain, self.tokens, 3, code=code)
        firsts = [sum(parts[:place]) for place in range(len(parts))]
        self.parts = [
            [
                LowRankPart(
                    first,
                    (drawn(seed + 100 * number + first, rank, inputs, dtype=FP32) * scale).to(
                        dtype
                    ),
                    drawn(seed + 101 * number + first, size, rank, dtype=dtype),
                )
                for first, size, rank in zip(firsts, parts, of_parts, strict=False)
                if rank
            ]
            for number, of_parts in enumerate(adapters, start=1)
        ]
        shapes = {3: self.layer.shape, 4: self.layer.shape}
        # One that changes nothing here changes another layer.
        self.adapters = [
            PackedAdapter(shapes, {3: each} if each else {4: self.part_of_all()}, code)
            for each in self.parts
        ]

    def part_of_all(self) -> list[LowRankPart]:
        inputs = self.weight.shape[1]
        return [LowRankPart(0, torch.ones(1, inputs), torch.ones(len(self.weight), 1))]

    def run(self, x: torch.Tensor, adapter_of: list[int]) -> torch.Tensor:
        self.tokens.begin(self.adapters, np.array(adapter_of, np.int32))
        out = torch.full((len(x), self.plain.num_outputs), NAN, dtype=self.dtype)
        assert self.layer(x, out) is out
        return out

    def exact(self, x: torch.Tensor, adapter_of: list[int]) -> torch.Tensor:
        """Return what comes of weights that were changed, in fp64, for each token by itself."""
        if isinstance(self.plain, QuantisedLinear):
            product = self.ungated(x).double()
        else:
            product = x.double() @ self.weight.double().T + self.bias.double()
        for token, adapter in enumerate(adapter_of):
            for part in self.parts[adapter] if adapter >= 0 else []:
                change = part.b.double() @ part.a.double()
                rows = slice(part.first_row, part.first_row + len(part.b))
                product[token, rows] += change @ x[token].double()
        if self.gate is None:
            return product.float()
        gates, up = product.chunk(2, dim=-1)
        if self.gate is Activation.GELU:
            return (functional.gelu(gates, approximate="tanh") * up).float()
        return (functional.silu(gates) * up).float()


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@variants
@settings(max_examples=40, deadline=None)
@given(
    parts=outputs_of_parts,
    inputs=st.integers(1, 70) | st.just(512),
    dtype=st.sampled_from([FP32, BF16, FP16]),
    adapters=st.lists(st.tuples(ranks, ranks, ranks), max_size=4),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_tokens_of_a_ragged_batch_have_their_own_adapters(
    name: str, parts: list[int], inputs: int, dtype: torch.dtype, adapters: list[Ranks],
    seed: int, data: st.DataObject,
) -> None:  # fmt: skip
    case = Case(parts, inputs, dtype, adapters, seed=seed, code=variant(name))
    numbers = st.integers(-1, len(adapters) - 1)
    adapter_of = data.draw(st.lists(numbers, max_size=40))
    x = drawn(seed + 7, len(adapter_of), inputs, dtype=dtype)
    assert_rounded_once(case.run(x, adapter_of), case.exact(x, adapter_of))


@variants
@settings(max_examples=25, deadline=None)
@given(
    outputs=st.integers(1, 40),
    gate=st.sampled_from(Activation),
    dtype=st.sampled_from([FP32, BF16, FP16]),
    adapters=st.lists(st.tuples(ranks, ranks), min_size=1, max_size=3),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_gate_and_up_are_changed_before_they_are_multiplied(
    name: str, outputs: int, gate: Activation, dtype: torch.dtype, adapters: list[Ranks],
    seed: int, data: st.DataObject,
) -> None:  # fmt: skip
    case = Case([outputs] * 2, 48, dtype, adapters, gate=gate, seed=seed, code=variant(name))
    numbers = st.integers(-1, len(adapters) - 1)
    adapter_of = data.draw(st.lists(numbers, max_size=30))
    x = drawn(seed + 7, len(adapter_of), 48, dtype=dtype)
    assert_rounded_once(case.run(x, adapter_of), case.exact(x, adapter_of))


@settings(max_examples=30, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=2, max_size=5),
    of_layers=st.lists(st.tuples(*[ranks] * 5), min_size=1, max_size=3),
    seed=st.integers(0, 1000),
)
def test_an_adapter_adds_to_each_layer_what_is_that_layers(
    shapes: list[tuple[int, int]], of_layers: list[Ranks], seed: int
) -> None:
    """All that an adapter adds is packed into one piece of memory."""
    code, tokens = native_code(), AdaptedTokens()
    assert code is not None
    weights = [drawn(seed + number, *shape, dtype=FP32) for number, shape in enumerate(shapes)]
    layers = [AdaptedLinear(PackedLinear(each), tokens, n) for n, each in enumerate(weights)]
    parts = [
        {
            number: LowRankPart(
                0,
                drawn(seed + 10 * place + number, rank, inputs, dtype=FP32),
                drawn(seed + 11 * place + number, outputs, rank, dtype=FP32),
            )
            for number, (rank, (outputs, inputs)) in enumerate(zip(each, shapes, strict=False))
            if rank
        }
        for place, each in enumerate(of_layers, start=1)
    ]
    laid_out = {number: layer.shape for number, layer in enumerate(layers)}
    adapters = [PackedAdapter(laid_out, {n: [p] for n, p in each.items()}, code) for each in parts]
    adapter_of = [-1, *range(len(adapters))]
    tokens.begin(adapters, np.array(adapter_of, np.int32))
    for number, (layer, weight) in enumerate(zip(layers, weights, strict=True)):
        x = drawn(seed + 7, len(adapter_of), weight.shape[1], dtype=FP32)
        expected = x.double() @ weight.double().T
        for token, each in enumerate(parts, start=1):
            if part := each.get(number):
                expected[token] += part.b.double() @ (part.a.double() @ x[token].double())
        assert_rounded_once(layer(x), expected.float())


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_matrices_that_are_views_of_others_are_taken_as_they_are_seen(dtype: torch.dtype) -> None:
    """A rank of several takes columns of some matrices; some checkpoints hold others transposed."""
    whole_a, turned_b = drawn(1, 5, 12, dtype=dtype), drawn(2, 5, 16, dtype=dtype)
    views = whole_a[:, 4:8], turned_b.T
    case = Case([8, 8], 4, dtype, [])
    x, code = drawn(3, 6, 4, dtype=dtype), native_code()
    assert code is not None
    found = []
    for a, b in (views, [view.contiguous() for view in views]):
        adapter = PackedAdapter({3: case.layer.shape}, {3: [LowRankPart(0, a, b)]}, code)
        case.tokens.begin([adapter], np.zeros(6, np.int32))
        found.append(case.layer(x))
    assert torch.equal(*found)


@variants
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("gate", [None, Activation.SILU])
def test_a_quantised_layer_is_changed_as_a_plain_one(
    name: str, bits: int, gate: Activation | None
) -> None:
    adapters: list[Ranks] = [(4, 16), (0, 64), (0, 0)]
    case = Case([40, 40], 96, FP32, adapters, gate=gate, bits=bits, code=variant(name))
    adapter_of = [0, 1, -1, 2, 1, 0, 0, 1, -1] * 4
    x = drawn(5, len(adapter_of), 96, dtype=FP32)
    assert_rounded_once(case.run(x, adapter_of), case.exact(x, adapter_of))


@variants
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("bits", [None, 8])
def test_a_token_is_bitwise_the_same_in_any_batch_on_any_threads(
    name: str, dtype: torch.dtype, bits: int | None
) -> None:
    adapters: list[Ranks] = [(16, 3, 64), (0, 7, 1)]
    case = Case([70, 30, 30], 512, dtype, adapters, bits=bits, code=variant(name))
    draw = np.random.default_rng(1)
    adapter_of = [*draw.integers(-1, 2, 150).tolist(), *[1] * 60, *[0] * 30]
    x = drawn(2, len(adapter_of), 512, dtype=dtype)
    with threads(1):
        together = case.run(x, adapter_of)
    with threads(3):
        assert torch.equal(case.run(x, adapter_of), together)
        for count in (1, 2, 5, 12, 13, 100):
            for start in (0, 240 - count):
                some = slice(start, start + count)
                assert torch.equal(case.run(x[some], adapter_of[some]), together[some])
    # And without an adapter, what the layer gives that knows of none.
    without = [token for token, adapter in enumerate(adapter_of) if adapter < 0]
    assert torch.equal(together[without], case.plain(x[without]))
    assert not torch.equal(together, case.plain(x))


def test_a_step_without_adapters_is_the_plain_layer_whatever_the_step_before_had() -> None:
    case = Case([40], 64, BF16, [(8,)])
    x = drawn(1, 5, 64, dtype=BF16)
    case.run(x, [0, 0, -1, 0, 0])
    case.tokens.begin((), np.empty(0, np.int32))
    for count in (5, 3):
        assert torch.equal(case.layer(x[:count]), case.plain(x[:count]))


def test_infinity_and_nan_of_one_token_stay_in_it() -> None:
    case, adapter_of = Case([40], 64, BF16, [(8,), (3,)]), [0, 1, 0, -1, 0, 0, 1]
    x = drawn(1, 7, 64, dtype=BF16)
    clean = case.run(x, adapter_of)
    x[2, 3], x[3, 0] = NAN, float("inf")
    out = case.run(x, adapter_of)
    assert out[2].isnan().all()
    kept = [0, 1, 4, 5, 6]
    assert torch.equal(out[kept], clean[kept])


def test_rows_of_a_wider_tensor_are_read_and_written_in_place() -> None:
    case, adapter_of = Case([40], 60, FP32, [(8,)]), [0, -1, 0] * 3
    wide, target = drawn(1, 9, 100, dtype=FP32), torch.full((9, 50), NAN)
    case.tokens.begin(case.adapters, np.array(adapter_of, np.int32))
    case.layer(wide[:, 7:67], target[:, 3:43])
    assert_rounded_once(target[:, 3:43], case.exact(wide[:, 7:67], adapter_of))
    assert target[:, :3].isnan().all()
    assert target[:, 43:].isnan().all()


def test_an_adapter_of_the_step_in_hand_stays_until_the_next() -> None:
    """Its memory is mapped: gone, it could not be read."""
    case = Case([40], 64, FP32, [(64,)])
    x = drawn(1, 4, 64, dtype=FP32)
    expected = case.run(x, [0] * 4)
    case.adapters.clear()
    gc.collect()
    assert torch.equal(case.layer(x), expected)


def test_an_adapter_takes_what_was_told_beforehand_and_less_if_it_is_smaller() -> None:
    code = native_code()
    assert code is not None
    case = Case([40, 40], 64, BF16, [(16, 16), (15, 16), (16, 0), (1, 1)])
    most = packed_bytes(case.layer.shape, [(0, 40), (40, 40)], 16, code)
    sizes = [adapter.num_bytes for adapter in case.adapters]
    assert sizes[0] == most
    assert all(size <= most for size in sizes)
    # Beside both matrices, the ranks of a filled up, there is no more than a page's worth of words.
    assert 2 * (32 * 64 + 16 * 96) <= most < 2 * (32 * 64 + 16 * 96) + 512


def parts_of(*parts: LowRankPart, dtype: torch.dtype = FP32) -> PackedAdapter:
    code = native_code()
    assert code is not None
    case = Case([8, 8], 4, dtype, [])
    given: Mapping[int, tuple[LowRankPart, ...]] = {3: parts}
    return PackedAdapter({3: case.layer.shape}, given, code)


def test_parts_that_do_not_fit_are_refused() -> None:
    a, b = torch.ones(2, 4), torch.ones(8, 2)
    parts_of(LowRankPart(8, a, b), LowRankPart(0, a, b))
    with pytest.raises(ValueError, match=r"a is \[2, 5\]"):
        parts_of(LowRankPart(0, torch.ones(2, 5), b))
    with pytest.raises(ValueError, match=r"b \[8, 3\]"):
        parts_of(LowRankPart(0, a, torch.ones(8, 3)))
    with pytest.raises(ValueError, match="rows 9 to 17, must have some of 0 to 16"):
        parts_of(LowRankPart(9, a, b))
    with pytest.raises(ValueError, match="rows 7 to 15, must have some of 8 to 16"):
        parts_of(LowRankPart(7, a, b), LowRankPart(0, a, b))
    with pytest.raises(ValueError, match="of rank 0"):
        parts_of(LowRankPart(0, torch.ones(0, 4), torch.ones(8, 0)))
    parts_of(LowRankPart(0, a, b * 1e5), dtype=BF16)
    with pytest.raises(ValueError, match=r"not all is finite in torch\.float16"):
        parts_of(LowRankPart(0, a, b * 1e5), dtype=FP16)
    with pytest.raises(ValueError, match=r"not all is finite in torch\.float32"):
        parts_of(LowRankPart(0, a / 0, b))


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case([40], 64, FP32, [(8,)])
    x = drawn(1, 4, 64, dtype=FP32)
    with pytest.raises(ValueError, match="adapters go from 0 to 1, must from -1 to 0"):
        case.tokens.begin(case.adapters, np.array([0, 1], np.int32))
    case.run(x, [0] * 4)
    with pytest.raises(ValueError, match="3 tokens; adapters were told of another number"):
        case.layer(x[:3])
    with pytest.raises(ValueError, match="x is"):
        case.layer(x[:, :60])
    monkeypatch.setattr(packed_linear, "native_code", lambda: None)
    with pytest.raises(ValueError, match="no native code"):
        AdaptedLinear(PackedLinear(case.weight), case.tokens, 0)
