"""The native code of the CPU kernels: compiled for this machine on first use, cached, loaded."""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch

SOURCES: Final = Path(__file__).parent / "cpu"
FLAGS: Final = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-pthread", "-shared",
                "-fPIC", "-w")  # fmt: skip
TIMEOUT_S: Final = 600.0
"""For the compiler, which takes some six seconds of processor time."""

# Numbers of types in kernels/cpu/kernels.cpp.
TYPES: Final = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float8_e4m3fn: 3,
    torch.float8_e5m2: 4,
}


class NoNativeCodeError(Exception):
    """This machine cannot build or load the native code; the text says why."""


def runs_natively(device: torch.device) -> bool:
    """Return whether kernels on `device` are native code, and not Triton's."""
    return device.type == "cpu" and os.environ.get("TRITON_INTERPRET", "0") in {"0", ""}


def native_code() -> ctypes.CDLL | None:
    """Return the kernels, compiled if this machine has not done so yet; None if it cannot."""
    return _settled()[0]


def why_no_native_code() -> str | None:
    """Return why there is no native code on this machine; None if there is."""
    return _settled()[1]


@functools.cache
def _settled() -> tuple[ctypes.CDLL | None, str | None]:
    """Find out once per process."""
    try:
        return build_and_load(cache_folder(os.environ)), None
    except NoNativeCodeError as error:
        return None, str(error)


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Return where compiled code is kept: below $PAGEMILL_CACHE, or ~/.cache/pagemill."""
    root = environment.get("PAGEMILL_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "pagemill") / "kernels"


def build_and_load(folder: Path, flags: tuple[str, ...] = FLAGS) -> ctypes.CDLL:
    """Return the kernels from `folder`, compiled into it if they are not there.

    A file is named by what went into it (sources, compiler, flags, processor), and appears whole
    or not at all: several processes may start at once.

    Raises: NoNativeCodeError if there is no compiler, or it or the loader fails.
    """
    compiler = shutil.which(os.environ.get("CXX") or "g++") or shutil.which("c++")
    if compiler is None:
        raise NoNativeCodeError("there is no C++ compiler (g++)")
    path = folder / f"cpu-{_fingerprint(compiler, flags)}.so"
    if not path.exists():
        _compile(compiler, flags, path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NoNativeCodeError(f"{path} cannot be loaded: {error}") from error


def _fingerprint(compiler: str, flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    version = _run((compiler, "--version")).partition("\n")[0]
    for part in (compiler, version, *flags, _processor()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:20]


def _compile(compiler: str, flags: tuple[str, ...], path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / "kernels.so"
            source = str(SOURCES / "kernels.cpp")
            _run((compiler, *flags, source, "-o", str(made)))
            made.replace(path)
    except OSError as error:
        raise NoNativeCodeError(f"{path.parent} cannot be written: {error}") from error


def _processor() -> str:
    """Return what `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    names = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(names)}))


def _run(command: tuple[str, ...]) -> str:
    try:
        done = subprocess.run(  # noqa: S603 our own arguments, and no shell
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True
        )
    except subprocess.CalledProcessError as error:
        first = error.stderr.strip().partition("\n")[0]
        raise NoNativeCodeError(f"{command[0]} failed: {first}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoNativeCodeError(f"{command[0]} did not run: {error}") from error
    return done.stdout
