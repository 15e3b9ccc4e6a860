"""A server's processes come up together, are watched, and all of them end when they should."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from pagemill.cli import processes
from pagemill.cli.child import ChildEndedError
from pagemill.cli.exit_status import CliError, ExitStatus
from pagemill.cli.processes import Programs, dial_address
from pagemill.client import AsyncClient, UnavailableError
from scripted_server import until

STUBS = Path(__file__).with_name("stub_programs.py")
DRIVER = """
import asyncio, sys
from pathlib import Path
from pagemill.cli.processes import Programs, serve
folder = Path(sys.argv[1])
stub = (sys.executable, sys.argv[2])
programs = Programs(
    scheduler=(*stub, "scheduler", f"pids={folder / 'pids'}"),
    worker=(*stub, "worker", f"pids={folder / 'pids'}"),
)
asyncio.run(serve(programs, folder, lambda address: print("ready", address, flush=True)))
"""


@pytest.fixture
def pids(tmp_path: Path) -> Iterator[Callable[[], list[int]]]:
    """Process ids of the stubs started so far; what is left of them is killed at the end."""

    def read() -> list[int]:
        file = tmp_path / "pids"
        return [int(line) for line in file.read_text().split()] if file.exists() else []

    yield read
    for pid in read():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def programs(tmp_path: Path) -> Callable[..., Programs]:
    """Return a maker of programs; its arguments are the stubs' settings."""

    def make(scheduler: str = "", worker: str = "", **patience: Any) -> Programs:
        stub = (sys.executable, str(STUBS))
        pids = f"pids={tmp_path / 'pids'}"
        defaults = {"ready_timeout_s": 30.0, "drain_timeout_s": 5.0, "stop_timeout_s": 0.1}
        return Programs(
            scheduler=(*stub, "scheduler", pids, *scheduler.split()),
            worker=(*stub, "worker", pids, *worker.split()),
            **{**defaults, **patience},
        )

    return make


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def none_alive(pids: list[int]) -> bool:
    return not any(alive(pid) for pid in pids)


def start(programs: Programs, folder: Path) -> tuple["asyncio.Task[int]", list[str]]:
    """Start a server; the list gets its address when it is ready."""
    ready: list[str] = []
    return asyncio.create_task(processes.serve(programs, folder, ready.append)), ready


async def test_a_signal_stops_both_and_the_status_is_0(
    tmp_path: Path, programs: Callable[..., Programs], pids: Callable[[], list[int]]
) -> None:
    server, ready = start(programs(), tmp_path)
    await until(lambda: bool(ready))
    async with AsyncClient(ready[0]) as client:
        assert await client.health()
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(server, 30) == 0
    assert len(pids()) == 2
    assert none_alive(pids())


async def test_workers_start_beside_the_scheduler_and_are_told_where_it_listens(
    tmp_path: Path, programs: Callable[..., Programs], pids: Callable[[], list[int]]
) -> None:
    async with processes.running(programs("late", num_workers=2), tmp_path):
        await until(lambda: len(pids()) == 3)


async def test_a_signal_during_the_start_stops_it(
    tmp_path: Path, programs: Callable[..., Programs], pids: Callable[[], list[int]]
) -> None:
    server, ready = start(programs("silent"), tmp_path)
    await until(lambda: len(pids()) == 2)
    os.kill(os.getpid(), signal.SIGINT)
    assert await asyncio.wait_for(server, 30) == 0
    assert not ready
    assert none_alive(pids())


async def test_a_worker_that_never_joined_is_not_waited_for(
    tmp_path: Path, programs: Callable[..., Programs], pids: Callable[[], list[int]]
) -> None:
    server, _ = start(programs("silent", stop_timeout_s=60), tmp_path)
    await until(lambda: len(pids()) == 2)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(server, 15) == 0
    assert none_alive(pids())


async def test_a_second_signal_kills(
    tmp_path: Path, programs: Callable[..., Programs], pids: Callable[[], list[int]]
) -> None:
    server, ready = start(programs("deaf", "deaf", drain_timeout_s=60), tmp_path)
    await until(lambda: bool(ready))
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(server, 30) == 128 + signal.SIGKILL
    assert none_alive(pids())


async def test_what_does_not_stop_in_time_is_killed(
    tmp_path: Path, programs: Callable[..., Programs], pids: Callable[[], list[int]]
) -> None:
    server, ready = start(programs("deaf", "deaf", drain_timeout_s=0.1), tmp_path)
    await until(lambda: bool(ready))
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(server, 30) == 128 + signal.SIGKILL
    assert none_alive(pids())


@pytest.mark.parametrize(
    ("scheduler", "worker", "message", "status"),
    [
        ("die=2", "", "the scheduler ended with status 2 before the server could answer", 2),
        ("silent", "die=3", "the worker ended with status 3 before the server could answer", 3),
        ("die=0", "", "the scheduler ended with status 0", 1),
    ],
)
async def test_an_early_death_is_told_with_its_status(
    tmp_path: Path,
    programs: Callable[..., Programs],
    pids: Callable[[], list[int]],
    scheduler: str,
    worker: str,
    message: str,
    status: int,
) -> None:
    with pytest.raises(ChildEndedError, match=message) as caught:
        await processes.serve(programs(scheduler, worker), tmp_path, lambda _: None)
    assert caught.value.status == status
    assert none_alive(pids())


async def test_last_words_are_shown_where_logs_are_kept(
    tmp_path: Path, programs: Callable[..., Programs]
) -> None:
    with pytest.raises(ChildEndedError, match=r"status 2 .*\n  worker: something is wrong"):
        async with processes.running(programs("silent", "die=2"), tmp_path):
            pytest.fail("it must not come up")


async def test_a_server_that_never_answers_is_given_up(
    tmp_path: Path, programs: Callable[..., Programs], pids: Callable[[], list[int]]
) -> None:
    with pytest.raises(CliError, match=r"could not answer within 1 s") as caught:
        await processes.serve(programs("silent", ready_timeout_s=1), tmp_path, lambda _: None)
    assert caught.value.status == ExitStatus.UNAVAILABLE
    assert none_alive(pids())


async def test_a_worker_that_dies_is_started_again(
    tmp_path: Path, programs: Callable[..., Programs], pids: Callable[[], list[int]]
) -> None:
    server, ready = start(programs(), tmp_path)
    await until(lambda: bool(ready))
    os.kill(pids()[1], signal.SIGKILL)
    await until(lambda: len(pids()) == 3)
    await until(lambda: alive(pids()[2]))
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(server, 30) == 0
    assert none_alive(pids())


async def test_each_of_several_workers_is_started_again_and_all_are_stopped(
    tmp_path: Path, programs: Callable[..., Programs], pids: Callable[[], list[int]]
) -> None:
    server, ready = start(programs(num_workers=3), tmp_path)
    await until(lambda: bool(ready))
    await until(lambda: len(pids()) == 4)
    for victim in pids()[1:3]:
        os.kill(victim, signal.SIGKILL)
    await until(lambda: len(pids()) == 6)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(server, 30) == 0
    assert none_alive(pids())


async def test_a_scheduler_that_dies_ends_the_server(
    tmp_path: Path, programs: Callable[..., Programs], pids: Callable[[], list[int]]
) -> None:
    server, ready = start(programs(), tmp_path)
    await until(lambda: bool(ready))
    os.kill(pids()[0], signal.SIGKILL)
    with pytest.raises(ChildEndedError, match="the scheduler ended with status 137"):
        await asyncio.wait_for(server, 30)
    assert none_alive(pids())


async def test_a_block_ends_its_server(
    tmp_path: Path, programs: Callable[..., Programs], pids: Callable[[], list[int]]
) -> None:
    async with processes.running(programs(), tmp_path) as address, AsyncClient(address) as client:
        assert await client.health()
    assert none_alive(pids())


async def test_a_failed_call_is_blamed_on_the_program_that_ended(
    tmp_path: Path, programs: Callable[..., Programs], pids: Callable[[], list[int]]
) -> None:
    async def use() -> None:
        async with processes.running(programs(), tmp_path):
            os.kill(pids()[0], signal.SIGKILL)
            await until(lambda: none_alive(pids()[:1]))
            raise UnavailableError("connection refused")

    with pytest.raises(ChildEndedError, match="the scheduler ended with status 137 while"):
        await use()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells children of a death")
async def test_nothing_outlives_a_parent_that_is_killed(
    tmp_path: Path, pids: Callable[[], list[int]]
) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path), str(STUBS)], stdout=subprocess.PIPE
    )
    with parent:
        try:
            assert parent.stdout is not None
            assert parent.stdout.readline().startswith(b"ready ")
        finally:
            parent.kill()
    assert len(pids()) == 2
    await until(lambda: none_alive(pids()))


@pytest.mark.parametrize(
    ("listening", "dialled"),
    [
        ("0.0.0.0:80", "127.0.0.1:80"),
        ("[::]:80", "[::1]:80"),
        ("10.0.0.1:80", "10.0.0.1:80"),
        ("unix:/run/a", "unix:/run/a"),
    ],
)
def test_all_interfaces_are_dialled_at_the_loopback(listening: str, dialled: str) -> None:
    assert dial_address(listening) == dialled
