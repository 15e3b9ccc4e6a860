"""What one row's step takes at the least: a program that measures it, asked for one answer."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pagemill.cli.exit_status import CliError
from pagemill.cli.program_settings import arguments, program

_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class ReadFloor:
    """Bytes and bandwidth."""

    weight_bytes: int
    """What a step reads of the weights."""

    read_bandwidth_gb_s: float
    """10^9 bytes per second."""

    @property
    def step_ms(self) -> float:
        """What reading the weights once takes."""
        return 1000 * self.weight_bytes / (1e9 * self.read_bandwidth_gb_s)


async def read_floor(model: Path, flags: Mapping[str, object]) -> ReadFloor:
    """Measure with the worker's type and threads.

    Raises: CliError if the program fails; it has said why on standard error.
    """
    wanted = {name: flags.get(name) for name in ("dtype", "threads", "quantization")}
    command = program("worker_svc.bench_read", str(model), *arguments(wanted))
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            output, _ = await process.communicate()
    except TimeoutError as error:
        process.kill()
        await process.wait()
        raise CliError(f"measuring read bandwidth took more than {_TIMEOUT_S:g} s") from error
    if process.returncode:
        raise CliError(f"measuring read bandwidth ended with status {process.returncode}")
    answer = json.loads(output)
    return ReadFloor(answer["weight_bytes"], answer["read_bandwidth_gb_s"])
