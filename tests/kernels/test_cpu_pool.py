"""The pool of threads behind the native kernels: every unit once, whoever calls, forked or not."""

import multiprocessing
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernels.cpu_build import native_code
from kernels.packed_linear import PackedLinear

pytestmark = pytest.mark.skipif(native_code() is None, reason="this machine compiles no C++")

ROWS, INPUTS, OUTPUTS = 24, 640, 1280  # enough work for several threads


@pytest.fixture(autouse=True)
def several_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def layer_and_rows() -> tuple[PackedLinear, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    weight = torch.randn(OUTPUTS, INPUTS, generator=draw).bfloat16()
    return PackedLinear(weight), torch.randn(ROWS, INPUTS, generator=draw).bfloat16()


def alone(layer: PackedLinear, rows: torch.Tensor) -> torch.Tensor:
    torch.set_num_threads(1)
    result = layer(rows)
    torch.set_num_threads(3)
    return result


def test_callers_side_by_side_get_what_one_gets_alone() -> None:
    layer, rows = layer_and_rows()
    expected = alone(layer, rows)
    wrong: list[int] = []

    def call() -> None:
        wrong.extend(n for n in range(300) if not torch.equal(layer(rows), expected))

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []


def test_helpers_that_slept_are_of_use_again() -> None:
    layer, rows = layer_and_rows()
    expected = alone(layer, rows)
    for _ in range(20):
        time.sleep(0.002)  # they watch for less, then sleep
        assert torch.equal(layer(rows), expected)


def _call_in_a_child(layer: PackedLinear, rows: torch.Tensor, expected: torch.Tensor) -> None:
    # Nothing of torch's that needs threads: its pool does not survive a fork.
    if layer(rows).tolist() != expected.tolist():
        raise SystemExit(1)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_helpers_of_its_own() -> None:
    layer, rows = layer_and_rows()
    expected = layer(rows)
    context = multiprocessing.get_context("fork")
    child = context.Process(target=_call_in_a_child, args=(layer, rows, expected))
    child.start()
    child.join(20)
    assert child.exitcode == 0


def test_a_pool_without_work_uses_no_processor() -> None:
    layer, rows = layer_and_rows()
    layer(rows)
    time.sleep(0.05)
    before = _ticks()
    time.sleep(0.5)
    assert _ticks() - before <= 2  # of a hundredth of a second


def _ticks() -> int:
    """Return the processor time of all threads of this process, in ticks of the kernel's clock."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
