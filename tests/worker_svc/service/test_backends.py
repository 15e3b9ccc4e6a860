"""A worker takes the best backend that serves, says which, and warns if that is not what it was."""

import io

import pytest
import torch

from kernels.tuned import Target
from worker_svc.errors import ConfigError
from worker_svc.model.native_operations import NativeOperations
from worker_svc.model.torch_operations import TorchOperations
from worker_svc.model.triton_operations import TritonOperations
from worker_svc.service import backends
from worker_svc.service.backends import check_block_size, choose_operations
from worker_svc.service.logs import make_logger

CPU = torch.device("cpu")


def choose(wanted: str, device: torch.device = CPU, head_dim: int = 64) -> tuple[object, str]:
    """Return the operations, and what was logged."""
    log = io.StringIO()
    made = choose_operations(
        wanted, device, torch.float32, head_dim, make_logger(log, "text", "info")
    )
    return made, log.getvalue()


def test_a_cpu_runs_native_code_and_the_log_has_one_line_of_it() -> None:
    made, log = choose("auto")
    assert isinstance(made, NativeOperations)
    assert log.count("\n") == 1
    assert 'level=info event="attention backend native"' in log


def test_the_operator_may_choose_torch_without_a_warning() -> None:
    made, log = choose("torch")
    assert isinstance(made, TorchOperations)
    assert "level=info" in log


def test_a_fallback_is_one_warning_that_names_reason_and_price(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backends, "why_no_native_code", lambda: "there is no C++ compiler (g++)")
    made, log = choose("auto")
    assert isinstance(made, TorchOperations)
    assert log.count("\n") == 1
    assert "level=warning" in log
    assert "there is no C++ compiler (g++); decoding takes some ten times as long" in log
    with pytest.raises(ConfigError, match=r"attention_backend: .*native cannot serve: there is no"):
        choose("native")


def test_a_head_that_native_code_lacks_falls_back_too() -> None:
    made, log = choose("auto", head_dim=20)
    assert isinstance(made, TorchOperations)
    assert "head_dim is 20, must be a multiple of 8" in log


def test_a_gpu_runs_triton_and_falls_back_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "target_of", lambda _device: Target("sm_90", 132))
    made, log = choose("auto", torch.device("cuda"))
    assert isinstance(made, TritonOperations)
    assert 'event="attention backend triton"' in log
    made, log = choose("auto", torch.device("cuda"), head_dim=20)
    assert isinstance(made, TorchOperations)
    assert "not triton: head_dim is 20" in log


def test_a_cpu_that_is_told_to_run_triton_says_why_it_cannot() -> None:
    with pytest.raises(ConfigError, match="the device is cpu, Triton needs a GPU"):
        choose("triton")


def test_blocks_that_no_gpu_kernel_serves_are_refused() -> None:
    check_block_size(16)
    with pytest.raises(ConfigError, match=r"block_size is 4, must be one of \(8, 16"):
        check_block_size(4)
