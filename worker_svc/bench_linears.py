"""Linear layers against torch's: packed ones, and quantised ones."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch.nn import functional

from kernels.packed_linear import PackedLinear
from kernels.quantised_linear import QuantisedLinear, QuantisedWeight, quantise
from kernels.weight_memory import WeightMemory
from worker_svc.bench_lines import COLD_BYTES, Line, Turns, dtype_name, times

BF16, FP32 = torch.bfloat16, torch.float32

_Layer: TypeAlias = PackedLinear | QuantisedLinear
_Make: TypeAlias = Callable[[WeightMemory], _Layer]

_LARGE = (4096, 2048)
# What follows a step's hidden states in SmolLM2-135M: queries with keys and values, output, gate
# with up, down, and the head.
_MODEL = ((960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576))


@dataclass(frozen=True, slots=True)
class _Case:
    kernel: str
    num_rows: int
    weight: torch.Tensor
    """[O, I], of the type of x"""

    told: str
    make: _Make


def linears(bench: Turns) -> Iterator[Line]:
    """Time all cases: a large matrix with any number of rows, and those of a small model."""
    for dtype in (BF16, FP32):
        weight = torch.randn(_LARGE).to(dtype)
        for num_rows in (1, 2, 3, 4, 7, 8, 16, 32, 64, 128, 256):
            yield _measure(bench, _packed(num_rows, weight))
        for shape in _MODEL:
            weight = torch.randn(shape).to(dtype)
            for num_rows in (1, 16, 64):
                yield _measure(bench, _packed(num_rows, weight))
    for bits in (8, 4):
        for shape, counts in ((_LARGE, (1, 4, 16, 64, 256)), *((s, (1, 64)) for s in _MODEL)):
            weight = torch.randn(shape).to(BF16)
            quantised = quantise(weight, bits)
            for num_rows in counts:
                yield _measure(bench, _quantised(num_rows, weight, quantised))


def _packed(num_rows: int, weight: torch.Tensor) -> _Case:
    return _Case(
        "packed_linear",
        num_rows,
        weight,
        dtype_name(weight.dtype),
        lambda memory: PackedLinear(weight, memory=memory),
    )


def _quantised(num_rows: int, weight: torch.Tensor, quantised: QuantisedWeight) -> _Case:
    return _Case(
        "quantised_linear",
        num_rows,
        weight,
        f"{quantised.bits} bits under {dtype_name(weight.dtype)}",
        lambda memory: QuantisedLinear(quantised, dtype=weight.dtype, memory=memory),
    )


def _measure(bench: Turns, case: _Case) -> Line:
    """Time a layer, and torch's; copies take turns, so that none is cached."""
    weight, memory = case.weight, WeightMemory()
    x = torch.randn(case.num_rows, weight.shape[1]).to(weight.dtype)
    copies = max(1, COLD_BYTES // 2 // weight.nbytes // max(1, case.num_rows // 16))
    layers = [case.make(memory)]
    # As many bytes of ours as of theirs: a small weight would stay in a cache.
    num_layers = max(1, copies * weight.nbytes // layers[0].num_bytes)
    layers += [case.make(memory) for _ in range(num_layers - 1)]
    weights = [weight.clone() for _ in range(copies)]
    columns = bench.time(
        lambda: _run_all(layers, x),
        lambda: [functional.linear(x, one) for one in weights],
        bench.read,
    )
    ours, theirs = _per_call(columns[0], num_layers), _per_call(columns[1], copies)
    num_bytes, median = layers[0].num_bytes, statistics.median(ours)
    speeds = [num_bytes / a / (COLD_BYTES / b) for a, b in zip(ours, columns[2], strict=True)]
    return Line(
        kernel=case.kernel,
        case=f"{case.num_rows} rows, {weight.shape[0]} x {weight.shape[1]}, {case.told}",
        seconds=median,
        share_of_read_bandwidth=statistics.median(speeds),
        tflops=2 * case.num_rows * weight.numel() / median / 1e12,
        f_linear_seconds=statistics.median(theirs),
        times_f_linear=times(ours, theirs),
    )


def _run_all(layers: Sequence[_Layer], x: torch.Tensor) -> None:
    for layer in layers:
        layer(x)


def _per_call(seconds: Sequence[float], calls: int) -> list[float]:
    return [turn / calls for turn in seconds]
