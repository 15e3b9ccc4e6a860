"""A listener for scrapers: GET /metrics and GET /healthz, one answer a connection.

It answers on the engine's event loop, since the registry reads the engine's state; the WSGI
server of prometheus-client would do so from threads, of which it bounds neither number nor
time.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

_TIMEOUT_S = 5.0
_MAX_HEAD_BYTES = 8192
_MAX_CONNECTIONS = 16


@asynccontextmanager
async def serve_metrics(address: str, registry: CollectorRegistry) -> AsyncIterator[int]:
    """Serve a registry at HOST:PORT while the block lasts; yield the port, chosen if PORT is 0.

    Raises: OSError if the address cannot be listened on.
    Cost: a scrape holds the loop for 3 ms.
    """
    host, _, port = address.rpartition(":")
    listener = _Listener(registry)
    server = await asyncio.start_server(
        listener.answer, host.strip("[]"), int(port), limit=_MAX_HEAD_BYTES
    )
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await listener.close()


class _Listener:
    """Answers each connection once, within a deadline, and knows those that are open."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._open: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read one request, answer it, and hang up."""
        task = asyncio.current_task()
        if task is None or len(self._open) >= _MAX_CONNECTIONS:
            writer.close()
            return
        self._open[task] = writer
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._response(head))
                await writer.drain()
        except (TimeoutError, OSError, EOFError, asyncio.LimitOverrunError):
            # Whoever is slow, gone or talks no HTTP gets no answer.
            pass
        finally:
            del self._open[task]
            writer.close()

    async def close(self) -> None:
        """Hang up on everyone. A cancelled task would be logged as an error of the loop."""
        tasks = list(self._open)
        for writer in self._open.values():
            writer.transport.abort()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _response(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if method not in {b"GET", b"HEAD"}:
            status, content = HTTPStatus.METHOD_NOT_ALLOWED, b"use GET\n"
        elif path == b"/metrics":
            status, content = HTTPStatus.OK, generate_latest(self._registry)
        elif path == b"/healthz":
            status, content = HTTPStatus.OK, b"ok\n"
        else:
            status, content = HTTPStatus.NOT_FOUND, b"there are /metrics and /healthz\n"
        lines = (
            f"HTTP/1.1 {status} {status.phrase}",
            f"Content-Type: {CONTENT_TYPE_PLAIN_0_0_4}",
            f"Content-Length: {len(content)}",
            "Connection: close",
        )
        return "\r\n".join([*lines, "", ""]).encode() + (b"" if method == b"HEAD" else content)
