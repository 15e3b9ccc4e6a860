"""Which device a worker runs on, and in which type it computes there."""

from pathlib import Path
from typing import Final

import psutil
import torch

from pagemill.v1 import worker_pb2
from worker_svc.errors import ConfigError

BFLOAT16_FLAGS: Final = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""What Linux calls instructions that multiply bfloat16, on x86-64 and on ARM."""

DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def choose_device(name: str) -> torch.device:
    """Return the device of a setting.

    Raises: ConfigError if the machine has no such device.
    """
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cpu" or (name == "auto" and num_devices == 0):
        return torch.device("cpu")
    device = torch.device("cuda" if name == "auto" else name)
    index = device.index or 0
    if index >= num_devices:
        raise ConfigError(f"device is {name!r}, and this machine has {num_devices} CUDA devices")
    return torch.device("cuda", index)


def usable_devices(name: str) -> tuple[torch.device, ...]:
    """Return the devices of a setting, the one it chooses first: all GPUs, unless it names one.

    Raises: ConfigError if the machine has no such device.
    """
    first = choose_device(name)
    if first.type != "cuda" or name.startswith("cuda:"):
        return (first,)
    return tuple(torch.device("cuda", index) for index in range(torch.cuda.device_count()))


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the type of a setting; for `auto` bfloat16 where the device computes in it."""
    if name != "auto":
        return DTYPES[name]
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if native else torch.float16
    return torch.bfloat16 if cpu_computes_bfloat16(_read_cpuinfo()) else torch.float32


def cpu_computes_bfloat16(cpuinfo: str) -> bool:
    """Return whether Linux's description of the processor names instructions for bfloat16."""
    return any(
        not BFLOAT16_FLAGS.isdisjoint(line.split())
        for line in cpuinfo.splitlines()
        if line.startswith(("flags", "Features"))
    )


def describe_device(device: torch.device) -> worker_pb2.Device:
    """Return the device's facts. A CPU has no uuid."""
    if device.type == "cpu":
        memory = psutil.virtual_memory().total
        return worker_pb2.Device(kind="cpu", memory_bytes=memory, name=_cpu_name(_read_cpuinfo()))
    facts = torch.cuda.get_device_properties(device)
    return worker_pb2.Device(
        kind=device.type, uuid=str(facts.uuid), memory_bytes=facts.total_memory, name=facts.name
    )


def _cpu_name(cpuinfo: str) -> str:
    """Return the model's name; empty where the processor does not tell, as most ARM ones."""
    for line in cpuinfo.splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return ""


def _read_cpuinfo() -> str:
    """Return Linux's description of the processor; nothing on other systems."""
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ""
