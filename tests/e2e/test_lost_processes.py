"""kill -9 of any process gives clear errors, or a pause; never a hang, a repeat or a loss."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from e2e.serving import Served, serving
from pagemill.client import AsyncClient, Delta, RetryPolicy
from pagemill.client.errors import UnavailableError
from tiny_llama import write_tiny_llama

PROMPT = list(range(40, 60))
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"), max_position_embeddings=2048)


@pytest.fixture
def served(tiny: Path) -> Iterator[Served]:
    with serving(str(tiny)) as running:
        yield running


async def generate(client: AsyncClient, count: int) -> list[int]:
    completion = await client.complete(
        prompt=PROMPT, max_tokens=count, temperature=0.0, ignore_eos=True, timeout=LIMIT_S
    )
    return list(completion.token_ids)


async def kill_after(client: AsyncClient, pid: int, tokens: int, count: int) -> list[int]:
    """Stream `count` tokens; kill a process when some have come."""
    received: list[int] = []
    killed = False
    async for event in client.generate(
        prompt=PROMPT, max_tokens=count, temperature=0.0, ignore_eos=True, timeout=LIMIT_S
    ):
        if isinstance(event, Delta):
            received += event.token_ids
        if len(received) >= tokens and not killed:
            os.kill(pid, signal.SIGKILL)
            killed = True
    return received


async def test_a_killed_worker_is_a_pause(served: Served) -> None:
    async with AsyncClient(served.address) as client:
        expected = await generate(client, 1500)
        worker = served.children()["worker_svc"]
        assert await kill_after(client, worker, 20, 1500) == expected
        assert served.children()["worker_svc"] != worker
        assert await generate(client, 10) == expected[:10]
        groups = (await client.server_info()).groups
    assert [group.epoch for group in groups] == [2]


async def test_a_worker_that_stays_away_makes_requests_unavailable(tiny: Path) -> None:
    """The wait is bounded; `serve` would bring the worker back, so a stopped one stands in."""
    with serving(str(tiny), "--worker-wait", "1") as served:
        worker = served.children()["worker_svc"]
        async with AsyncClient(served.address, retry=RetryPolicy(max_attempts=1)) as client:
            os.kill(worker, signal.SIGSTOP)
            try:
                with pytest.raises(UnavailableError, match="worker"):
                    await generate(client, 50)
            finally:
                os.kill(worker, signal.SIGCONT)
        # Its heartbeats ran out: it was told to join again, and does.
        async with AsyncClient(served.address) as client:
            deadline = time.monotonic() + LIMIT_S
            while not await client.health():
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
            assert len(await generate(client, 5)) == 5


async def test_a_killed_scheduler_ends_its_calls_and_the_command(tiny: Path) -> None:
    with serving(str(tiny)) as served:
        children = served.children()
        async with AsyncClient(served.address, retry=RetryPolicy(max_attempts=1)) as client:
            with pytest.raises(UnavailableError):
                await kill_after(client, children["scheduler_svc"], 20, 1500)
        assert served.process.wait(30) != 0
        assert "scheduler" in served.log()
        deadline = time.monotonic() + 20
        while Path(f"/proc/{children['worker_svc']}").exists():
            assert time.monotonic() < deadline, "the worker outlived the command"
            await asyncio.sleep(0.05)


async def test_a_killed_command_leaves_nothing_behind(tiny: Path) -> None:
    with serving(str(tiny)) as served:
        children = served.children()
        served.process.kill()
        served.process.wait()
        deadline = time.monotonic() + 30
        while any(Path(f"/proc/{pid}").exists() for pid in children.values()):
            assert time.monotonic() < deadline, "a child outlived the command"
            await asyncio.sleep(0.05)


async def test_a_client_that_dies_frees_its_blocks(served: Served) -> None:
    async with AsyncClient(served.address) as client:
        stream = client.generate(
            prompt=PROMPT, max_tokens=1900, temperature=0.0, ignore_eos=True, timeout=LIMIT_S
        )
        async for event in stream:
            if isinstance(event, Delta):
                break
        await stream.aclose()
        deadline = time.monotonic() + 5
        while (load := await client.load()).used_blocks or load.running:
            assert time.monotonic() < deadline
    assert load.waiting == 0


@contextmanager
def program(module: str, *arguments: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Run one program by itself, as a container would; kill it in the end."""
    command = [sys.executable, "-m", module, *arguments]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


async def test_a_scheduler_that_comes_back_finds_its_worker_with_the_model_loaded(
    tiny: Path, socket_path: Path
) -> None:
    address, dial = f"unix:{socket_path}", f"unix:{socket_path}w"
    scheduler = ("scheduler_svc", str(tiny), "--listen", address, "--worker-listen", dial)
    with program("worker_svc", str(tiny), "--join", dial, "--device", "cpu") as worker:
        answers = []
        for _ in range(2):
            with program(*scheduler):
                retry = RetryPolicy(max_attempts=200, max_pause_s=0.2)
                async with AsyncClient(address, retry=retry) as client:
                    answers.append(await generate(client, 40))
                    (group,) = (await client.server_info()).groups
            assert [each.rank for each in group.workers] == [0]
            assert worker.poll() is None
    assert answers[0] == answers[1]
    assert len(answers[0]) == 40
