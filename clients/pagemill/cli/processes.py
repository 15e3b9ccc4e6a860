"""A scheduler and its workers as processes: brought up, watched, and stopped in order."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pagemill.cli.child import Child, ChildEndedError, Children
from pagemill.cli.exit_status import CliError, ExitStatus
from pagemill.cli.restarts import Restarts
from pagemill.cli.terminal import say
from pagemill.client import (
    AsyncClient,
    DeadlineExceededError,
    RetryPolicy,
    UnavailableError,
)

SCHEDULER = "scheduler"
WORKER = "worker"

T = TypeVar("T")

_POLL_S = 0.05
_HEALTH_TIMEOUT_S = 5.0
# A call can fail before the end of the program behind it is known here.
_BLAME_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """What to start, and how long to be patient with it."""

    scheduler: tuple[str, ...]
    """Command line. It prints `listening ADDRESS` and `workers ADDRESS`."""

    worker: tuple[str, ...]
    """Command line, to which `--join -` is added: it reads the address from standard input."""

    num_workers: int = 1
    """Workers to start with it: the ranks of one group."""

    ready_timeout_s: float = 600.0
    """Seconds until the server can answer: the model is loaded meanwhile."""

    drain_timeout_s: float = 600.0
    """Seconds for the scheduler to end when asked to. It has a shorter limit of its own."""

    stop_timeout_s: float = 10.0
    """Seconds for a worker to end once its scheduler has, and again once it is asked to."""


async def serve(programs: Programs, folder: Path, announce: Callable[[str], None]) -> int:
    """Run a server until SIGTERM or SIGINT; return the scheduler's exit status.

    `announce` is told the address when the server can answer. The first signal stops the
    scheduler, which drains and stops its workers; the second kills all of them at once.

    Raises: CliError if the server does not come up, or a program ends that should not.
    """
    async with Children(folder, keep_logs=False) as children:
        stop = asyncio.Event()
        with _two_stage_signals(stop.set, children.kill):
            life = asyncio.create_task(_live(children, programs, announce))
            asked = asyncio.create_task(stop.wait())
            await asyncio.wait({life, asked}, return_when=asyncio.FIRST_COMPLETED)
            asked.cancel()
            if life.done():
                await life
            life.cancel()
            await asyncio.gather(life, return_exceptions=True)
            return await _wind_down(children, programs)


@contextlib.asynccontextmanager
async def running(
    programs: Programs, folder: Path, *, own_groups: bool = True
) -> AsyncIterator[str]:
    """Run a server for the length of a block; yield its address.

    Logs are kept in `folder`, and shown only if a program ends that should not.

    Raises: CliError if the server does not come up, or ended while it was needed.
    """
    async with Children(folder, keep_logs=True, own_groups=own_groups) as children:
        server = await _bring_up(children, programs)
        try:
            yield server.address
        except UnavailableError as error:
            for child in children:
                if await child.ended_within(_BLAME_S):
                    raise ChildEndedError(child, "while it was needed") from error
            raise
        finally:
            await _wind_down(children, programs)


@dataclass(frozen=True, slots=True)
class _Server:
    address: str
    """Where clients connect, as the scheduler says it."""

    scheduler: Child
    workers: tuple[Child, ...]
    restart_worker: Callable[[str], Awaitable[Child]]
    """Starts a worker of a name, in place of one that has ended."""


async def _live(children: Children, programs: Programs, announce: Callable[[str], None]) -> None:
    """Bring a server up and keep it so. Ends only by an error."""
    server = await _bring_up(children, programs)
    announce(server.address)
    await _keep_up(server)


async def _bring_up(children: Children, programs: Programs) -> _Server:
    """Start both programs; return when the server can answer.

    Workers, who import for longer than anything else takes, begin with that, and are told where
    the scheduler listens once it is known.
    """

    async def start_worker(name: str) -> Child:
        return await children.start(name, (*programs.worker, "--join", "-"), is_told=True)

    try:
        async with asyncio.timeout(programs.ready_timeout_s):
            scheduler = await children.start(SCHEDULER, programs.scheduler)
            workers = [await start_worker(name) for name in _names(programs.num_workers)]
            address = await _until(children, lambda: _said(scheduler, "listening"))
            joined = dial_address(await _until(children, lambda: _said(scheduler, "workers")))
            for worker in workers:
                worker.tell(joined)
            # Its own attempts would only delay the news that a program has ended.
            once = RetryPolicy(max_attempts=1)
            async with AsyncClient(dial_address(address), retry=once) as client:
                await _until(children, lambda: _healthy(client))
    except TimeoutError as error:
        raise CliError(
            f"the server could not answer within {programs.ready_timeout_s:g} s",
            ExitStatus.UNAVAILABLE,
        ) from error

    async def restart_worker(name: str) -> Child:
        worker = await start_worker(name)
        worker.tell(joined)
        return worker

    return _Server(address, scheduler, tuple(workers), restart_worker)


def _names(num_workers: int) -> list[str]:
    """Return names for messages. Which rank a worker gets is the scheduler's to say."""
    if num_workers == 1:
        return [WORKER]
    return [f"{WORKER} {number}" for number in range(1, num_workers + 1)]


async def _until(children: Children, look: Callable[[], Awaitable[T | None]]) -> T:
    """Look until there is something; the caller's timeout bounds it.

    Raises: ChildEndedError if a program ends meanwhile.
    """
    while True:
        for child in children:
            if child.status is not None:
                raise ChildEndedError(child, "before the server could answer")
        if (found := await look()) is not None:
            return found
        await asyncio.sleep(_POLL_S)


async def _said(child: Child, word: str) -> str | None:
    return child.said(word)


async def _healthy(client: AsyncClient) -> bool | None:
    try:
        return await client.health(timeout=_HEALTH_TIMEOUT_S) or None
    except (UnavailableError, DeadlineExceededError):
        return None


async def _keep_up(server: _Server) -> None:
    """Start each worker again when it dies. Ends only by an error."""
    keeping = [asyncio.create_task(_keep_worker_up(server, worker)) for worker in server.workers]
    try:
        done, _ = await asyncio.wait(keeping, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in keeping:
            task.cancel()
    for task in done:
        await task


async def _keep_worker_up(server: _Server, worker: Child) -> None:
    restarts = Restarts()
    clock = asyncio.get_running_loop().time
    while True:
        started_s = clock()
        if await _first_to_end(server.scheduler, worker) is server.scheduler:
            raise ChildEndedError(server.scheduler, "though nobody asked it to")
        pause_s = restarts.pause_s(worker.status, clock() - started_s)
        if pause_s is None:
            raise ChildEndedError(worker, "and would again")
        ended = f"the {worker.name} ended with status {worker.status}"
        say(f"{ended}; starting it again in {pause_s:g} s")
        if await server.scheduler.ended_within(pause_s):
            raise ChildEndedError(server.scheduler, "though nobody asked it to")
        worker = await server.restart_worker(worker.name)


async def _first_to_end(*some: Child) -> Child:
    waits = {asyncio.create_task(child.wait()): child for child in some}
    try:
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    return next(child for wait, child in waits.items() if wait in done)


async def _wind_down(children: Children, programs: Programs) -> int:
    """Stop the scheduler, which stops its workers, then whatever is left; return the status."""
    scheduler_status = 0
    for child in children:
        if child.name == SCHEDULER:
            child.terminate()
            if not await child.ended_within(programs.drain_timeout_s):
                say(f"the {child.name} did not stop within {programs.drain_timeout_s:g} s")
                child.kill()
            scheduler_status = await child.wait()
        else:
            # One that never joined was not stopped by the scheduler, and would dial on.
            child.terminate()
            if not await child.ended_within(programs.stop_timeout_s):
                child.kill()
    # A signal that comes before the scheduler can handle one ends it by itself.
    return 0 if scheduler_status == 128 + signal.SIGTERM else scheduler_status


@contextlib.contextmanager
def _two_stage_signals(first: Callable[[], None], second: Callable[[], None]) -> Iterator[None]:
    """Call `first` at the first SIGTERM, SIGINT or SIGHUP, `second` at each one after it."""
    loop = asyncio.get_running_loop()
    stages = iter([first])

    def handle() -> None:
        next(stages, second)()

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in signals:
        loop.add_signal_handler(number, handle)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


def dial_address(listening: str) -> str:
    """Return where to dial what listens there: all interfaces are no address to dial."""
    host, _, port = listening.rpartition(":")
    loopback = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host)
    return f"{loopback}:{port}" if loopback else listening
