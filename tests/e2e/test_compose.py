"""The commands of docker/compose.yaml, run as processes: a server comes up, answers, and goes."""

import asyncio
import re
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import yaml

from pagemill.client import AsyncClient
from source_tree import ROOT
from tiny_llama import write_tiny_llama

START_LIMIT_S = 60
STOP_LIMIT_S = 30
VARIABLE = re.compile(r"\$\{(\w+):-([^}]*)\}")


def _words(service: str, **replaced: str) -> list[str]:
    """Return a service's command with our values for some flags, and defaults for variables."""
    compose = yaml.safe_load((ROOT / "docker/compose.yaml").read_text(encoding="utf-8"))
    words = [VARIABLE.sub(r"\2", word) for word in compose["services"][service]["command"]]
    assert words[0].startswith("/models/")
    words[0] = replaced.pop("model")
    for flag, value in replaced.items():
        (place,) = (i for i, word in enumerate(words) if word.startswith(f"--{flag}="))
        words[place] = f"--{flag}={value}"
    return words


@asynccontextmanager
async def _program(module: str, *words: str) -> AsyncIterator[Process]:
    """Run a program for the length of a block; it must end with status 0 by then."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *words, stdout=PIPE, stderr=None
    )
    try:
        yield process
        async with asyncio.timeout(STOP_LIMIT_S):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _said(process: Process, word: str) -> str:
    assert process.stdout is not None
    line = (await process.stdout.readline()).decode().split()
    assert line[:1] == [word]
    return line[1]


async def test_the_profile_cpu_serves_and_drains(tmp_path: Path) -> None:
    model = str(write_tiny_llama(tmp_path / "tiny"))
    free = "127.0.0.1:0"
    addresses = {"listen": free, "worker-listen": free, "metrics-listen": free}
    scheduler_words = _words("scheduler", model=model, **addresses)
    async with asyncio.timeout(START_LIMIT_S + STOP_LIMIT_S):
        async with _program("scheduler_svc", *scheduler_words) as scheduler:
            address = await _said(scheduler, "listening")
            join = await _said(scheduler, "workers")
            worker_words = _words("worker-cpu", model=model, join=join)
            async with _program("worker_svc", *worker_words), AsyncClient(address) as client:
                while not await client.health():
                    await asyncio.sleep(0.05)
                completion = await client.complete(prompt="ab", model="demo", max_tokens=4)
                assert 1 <= completion.usage.completion_tokens <= 4
                scheduler.send_signal(signal.SIGTERM)
