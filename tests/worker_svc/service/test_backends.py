"""A worker takes the best backend that serves, says which, and warns if that is not what it was."""

import io

import pytest
import torch

from worker_svc.errors import ConfigError
from worker_svc.model.native_operations import NativeOperations
from worker_svc.model.torch_operations import TorchOperations
from worker_svc.service import backends
from worker_svc.service.backends import choose_operations
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


def test_a_gpu_runs_torch_as_before() -> None:
    made, log = choose("auto", torch.device("cuda"))
    assert isinstance(made, TorchOperations)
    assert "level=info" in log
