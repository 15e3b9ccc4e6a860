"""Lines of standard input that may never come, read so that Ctrl-C need not wait for them."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from typing import Final

MAX_LINE_BYTES: Final = 4096
"""What is longer comes in several pieces."""


async def input_lines(descriptor: int) -> AsyncIterator[str]:
    """Yield the lines of a file descriptor until it ends; what is no UTF-8 is replaced.

    Whoever writes them bounds the wait.
    """
    while line := await _line(descriptor):
        yield line.decode(errors="replace")


async def _line(descriptor: int) -> bytes:
    # Not asyncio.to_thread: the loop ends only behind such a thread. And without a buffer, whose
    # lock a thread that still reads would keep from the interpreter's own end.
    loop = asyncio.get_running_loop()
    found: asyncio.Future[bytes] = loop.create_future()

    def give(line: bytes) -> None:
        if not found.done():
            found.set_result(line)

    def read() -> None:
        line = b""
        with contextlib.suppress(OSError), open(descriptor, "rb", 0, closefd=False) as raw:
            line = raw.readline(MAX_LINE_BYTES)
        # The loop may have ended meanwhile.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(give, line)

    threading.Thread(target=read, name="input", daemon=True).start()
    return await found
