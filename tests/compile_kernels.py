"""Builds kernels for GPUs that are not there, and reads what the compiler made of them.

The wrappers themselves are called, on small CPU tensors, under a driver that only compiles: so
what is built is what would be launched, with the same specialisations. Run as a program, in a
process without TRITON_INTERPRET, it takes builds as JSON on stdin and prints one report per line.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Thread
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from kernels import tuned

TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), 108),
    "sm_90": (GPUTarget("cuda", 90, 32), 132),
    "sm_100": (GPUTarget("cuda", 100, 32), 148),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 304),
}
# What one program may have, in bytes.
SHARED_MEMORY = {"sm_80": 166912, "sm_90": 232448, "sm_100": 232448, "gfx942": 65536}


@dataclass(frozen=True, slots=True)
class Build:
    """One kernel for one GPU."""

    kernel: str
    target: str
    dtype: str
    kv_dtype: str
    head_dim: int
    block_size: int = 16


@dataclass(frozen=True, slots=True)
class Report:
    """What the compiler made of a build, the largest of its launches first."""

    build: Build
    name: str
    registers: int
    spills: int
    """Bytes, stores and loads together."""

    shared: int
    """Bytes of shared memory."""

    wide_loads: int
    """Instructions that load or copy 16 bytes from global memory."""

    loads: int
    """Instructions that load from global memory, of any width."""

    matrix: str
    """The tensor-core instruction, if there is one."""

    warps: int
    stages: int


class CompileOnly:
    """A driver with a target and no device."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling_for(name: str) -> Iterator[list[Any]]:
    """Let every launch only compile, for the target; yields the kernels that were built."""
    target, processors = TARGETS[name]
    built: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        self.device_caches.clear()
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        built.append(kernel)
        return kernel

    def target_of(device: torch.device) -> tuned.Target:
        return tuned.Target(name, processors)

    def runs_natively(device: torch.device) -> bool:
        # The tensors lie on the CPU only because there is no GPU.
        return False

    patches: list[Any] = [mock.patch.object(JITFunction, "run", compile_only)]
    patches += [
        mock.patch.object(module, replaced.__name__, replaced)
        for module in list(sys.modules.values())
        for replaced in (target_of, runs_natively)
        if getattr(module, "__name__", "").startswith("kernels.")
        and hasattr(module, replaced.__name__)
    ]
    driver.set_active(CompileOnly(target))
    try:
        for patch in patches:
            patch.start()
        yield built
    finally:
        for patch in patches:
            patch.stop()


def report(build: Build, kernel: Any) -> Report:
    """Read the compiled code of one launch."""
    if build.target.startswith("gfx"):
        return _report_amd(build, kernel)
    ptx = kernel.asm["ptx"]
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [tools / "cuobjdump", "--dump-resource-usage", file.name],
            check=True, capture_output=True, text=True, timeout=60,
        ).stdout  # fmt: skip
    numbers = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage))
    sass_names = re.findall(r"\b(wgmma|tcgen05\.mma|mma\.sync|dp4a)", ptx)
    wide = len(
        re.findall(
            r"ld\.global[.\w:]*\.v4\.b32|ld\.global[.\w:]*\.v2\.b64|"
            r"cp\.async\.c[ga]\.shared\.global[^;]*, (?:0x10|16)\b",
            ptx,
        )
    )
    loads = len(re.findall(r"ld\.global|cp\.async\.c[ga]\.shared\.global", ptx))
    return Report(
        build,
        kernel.metadata.name,
        int(numbers["REG"]),
        int(numbers["LOCAL"]) + int(numbers["STACK"]),
        kernel.metadata.shared,
        wide,
        loads,
        sass_names[0] if sass_names else "",
        kernel.metadata.num_warps,
        kernel.metadata.num_stages,
    )


def _report_amd(build: Build, kernel: Any) -> Report:
    text = kernel.asm["amdgcn"]

    def number(key: str) -> int:
        found = re.search(rf"\.{key}:?\s+(\d+)", text)
        return int(found[1]) if found else -1

    matrix = re.findall(r"\b(v_mfma_\w+)", text)
    return Report(
        build,
        kernel.metadata.name,
        number("vgpr_count"),
        number("vgpr_spill_count") * 4 + number("sgpr_spill_count") * 4,
        kernel.metadata.shared,
        len(re.findall(r"(?:global|buffer)_load_dwordx4", text)),
        len(re.findall(r"(?:global|buffer)_load_", text)),
        matrix[0] if matrix else "",
        kernel.metadata.num_warps,
        kernel.metadata.num_stages,
    )


def build_all(builds: list[Build], processes: int = 1) -> list[Report]:
    """Build in processes of their own, in which Triton does not interpret."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    running = []
    for start in range(processes):
        process = subprocess.Popen(
            [sys.executable, __file__], env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        lines = "".join(json.dumps(asdict(build)) + "\n" for build in builds[start::processes])
        output: list[str] = []
        reader = Thread(target=_collect, args=(process, lines, output))
        reader.start()
        running.append((process, reader, output))
    reports = []
    for process, reader, output in running:
        reader.join()
        if process.returncode:
            raise RuntimeError(f"a compiling process ended with {process.returncode}")
        for line in output:
            fields = json.loads(line)
            reports.append(Report(**fields | {"build": Build(**fields["build"])}))
    return sorted(reports, key=lambda report: (builds.index(report.build), report.name))


def _collect(process: subprocess.Popen[str], lines: str, output: list[str]) -> None:
    output += process.communicate(lines)[0].splitlines()


def table(reports: list[Report]) -> str:
    """Lay the reports out for docs/kernels_compiled.md."""
    head = (
        "| kernel | target | activations | cache | head dim | block | warps | stages | registers "
        "| spilled bytes | shared bytes | 16-byte loads | all loads | matrix instruction |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"
    )
    rows = []
    for r in reports:
        b = r.build
        cells = (r.name.strip("_"), b.target, b.dtype, b.kv_dtype, b.head_dim, b.block_size,
                 r.warps, r.stages, r.registers, r.spills, r.shared, r.wide_loads, r.loads,
                 r.matrix or "none")  # fmt: skip
        rows.append("| " + " | ".join(str(cell) for cell in cells) + " |\n")
    return head + "".join(rows)


def main() -> None:
    """Build what stdin lists, and print a report per launch."""
    # Not at the top: it imports this module.
    from kernel_launches import launch

    for line in sys.stdin:
        build = Build(**json.loads(line))
        with compiling_for(build.target) as built:
            launch(build)
        for kernel in built:
            print(json.dumps(asdict(report(build, kernel))), flush=True)


if __name__ == "__main__":
    main()
