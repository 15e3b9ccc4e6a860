"""A scripted server on a thread of its own, for clients that have, or need, no event loop."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Iterator

import pytest

from scripted_server import ScriptedServer, serving


@pytest.fixture
def script() -> ScriptedServer:
    return ScriptedServer()


@pytest.fixture
def address(script: ScriptedServer) -> Iterator[str]:
    """Address of a server that plays `script`."""
    started: concurrent.futures.Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]]
    started = concurrent.futures.Future()

    async def serve() -> None:
        done = asyncio.Event()
        async with serving(script) as where:
            started.set_result((where, asyncio.get_running_loop(), done))
            await done.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    where, loop, done = started.result(10)
    yield where
    loop.call_soon_threadsafe(done.set)
    thread.join(10)
    assert not thread.is_alive()
