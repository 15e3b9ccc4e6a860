"""A request's deadline on the event loop."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def at_deadline(deadline_ns: int | None, call: Callable[[], None]) -> Iterator[None]:
    """Call if a deadline of the monotonic clock passes while the block lasts. None: never."""
    if deadline_ns is None:
        yield
        return
    delay_s = (deadline_ns - time.monotonic_ns()) / 1e9
    timer = asyncio.get_running_loop().call_later(delay_s, call)
    try:
        yield
    finally:
        timer.cancel()
