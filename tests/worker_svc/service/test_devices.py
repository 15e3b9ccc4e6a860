"""The devices and types that `auto` stands for, and those a machine does not have."""

import pytest
import torch

from worker_svc.errors import ConfigError
from worker_svc.service.devices import (
    choose_device,
    choose_dtype,
    cpu_computes_bfloat16,
    describe_device,
    usable_devices,
)


@pytest.mark.parametrize(
    ("cpuinfo", "computes"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16 clzero\n", True),
        ("flags\t\t: fpu amx_bf16 amx_tile\n", True),
        ("Features\t: fp asimd i8mm bf16 dgh\n", True),
        ("flags\t\t: fpu avx2 avx512f\n", False),
        ("Features\t: fp asimd svebf16x\n", False),
        ("model name\t: a bf16 in the name only\n", False),
        ("", False),
    ],
)
def test_bfloat16_is_chosen_by_the_instructions_there_are(cpuinfo: str, computes: bool) -> None:
    assert cpu_computes_bfloat16(cpuinfo) == computes


def test_a_named_type_is_that_type() -> None:
    cpu = torch.device("cpu")
    assert choose_dtype("float16", cpu) == torch.float16
    assert choose_dtype("auto", cpu) in {torch.float32, torch.bfloat16}


def test_a_device_the_machine_does_not_have_is_refused() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"device is 'cuda:99', and this machine has \d+ CUDA"):
        choose_device("cuda:99")


def test_all_gpus_are_usable_unless_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    found = {
        name: [str(device) for device in usable_devices(name)]
        for name in ("auto", "cuda", "cuda:2", "cpu")
    }
    every = ["cuda:0", "cuda:1", "cuda:2"]
    assert found == {"auto": every, "cuda": every, "cuda:2": ["cuda:2"], "cpu": ["cpu"]}


def test_a_cpu_has_memory_and_no_uuid() -> None:
    device = describe_device(torch.device("cpu"))
    assert device.kind == "cpu"
    assert not device.uuid
    assert device.memory_bytes > 1 << 20


@pytest.mark.gpu
def test_a_gpu_has_a_uuid() -> None:
    device = describe_device(choose_device("auto"))
    assert device.kind == "cuda"
    assert device.uuid
