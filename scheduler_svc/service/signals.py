"""Two stages of stopping: the first signal asks for it, the second insists."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def two_stage_signals() -> Iterator[asyncio.Event]:
    """Yield an event that the first SIGTERM or SIGINT sets; the second cancels this task."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    asked = asyncio.Event()

    def take() -> None:
        if not asked.is_set():
            asked.set()
        elif task is not None:
            task.cancel()

    for number in _SIGNALS:
        loop.add_signal_handler(number, take)
    try:
        yield asked
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
