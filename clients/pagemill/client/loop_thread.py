"""An event loop on a thread of its own, with one client living in it."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from pagemill.client.async_client import AsyncClient
from pagemill.client.errors import CallCancelledError

ResultT = TypeVar("ResultT")

_JOIN_TIMEOUT_S = 10.0

Started = tuple[asyncio.AbstractEventLoop, AsyncClient, asyncio.Event]


class LoopThread:
    """Runs a client's coroutines for callers on other threads."""

    def __init__(self, connect: Callable[[], AsyncClient]) -> None:
        """Start the thread, and make the client there.

        Raises: ValueError, as `connect` does; no thread is left then.
        """
        started: concurrent.futures.Future[Started] = concurrent.futures.Future()
        # A daemon: a client that nobody closed does not keep the program from ending.
        self._thread = threading.Thread(
            target=lambda: asyncio.run(_host(connect, started)),
            name="pagemill-client",
            daemon=True,
        )
        self._thread.start()
        self._loop, self.client, self._closing = started.result(_JOIN_TIMEOUT_S)
        self.closed = False

    def run(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Return what a coroutine returns; its own timeout bounds the wait.

        Raises: RuntimeError if the client was closed before, CallCancelledError if it is
            closed meanwhile, and what the coroutine raises.
        """
        if self.closed:
            work.close()
            raise RuntimeError("the client is closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError as error:
            raise CallCancelledError("the client was closed during the call") from error
        finally:
            # An interrupt of the waiting thread ends the call too; a finished one is past it.
            future.cancel()

    def close(self) -> None:
        """Close the client and end the thread. Idempotent."""
        if not self.closed:
            self.closed = True
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join(_JOIN_TIMEOUT_S)


async def _host(
    connect: Callable[[], AsyncClient], started: "concurrent.futures.Future[Started]"
) -> None:
    try:
        client = connect()
    except ValueError as error:
        started.set_exception(error)
        return
    closing = asyncio.Event()
    async with client:
        started.set_result((asyncio.get_running_loop(), client, closing))
        # Bounded by the owner, who closes the client or ends the process.
        await closing.wait()
