"""Being asked to stop: finish the step first; asked again, stop at once."""

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)

_CLOSE_DEADLINE_S: Final = 5.0


class Shutdown:
    """Whether the process was asked to stop, and how to wake those who wait for something else."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked = threading.Event()
        self._wakers: list[Callable[[], None]] = []

    @property
    def asked(self) -> bool:
        """Whether someone asked."""
        return self._asked.is_set()

    def ask(self) -> None:
        """Ask to stop, and wake everybody who registered. Only the first time counts."""
        with self._lock:
            if self._asked.is_set():
                return
            self._asked.set()
            wakers = tuple(self._wakers)
        for wake in wakers:
            wake()

    def wait(self, timeout_s: float) -> bool:
        """Return whether someone asked, after at most `timeout_s`."""
        return self._asked.wait(timeout_s)

    @contextmanager
    def waking(self, wake: Callable[[], None]) -> Iterator[None]:
        """Have `wake` called when someone asks; at once, if someone did. From any thread."""
        with self._lock:
            self._wakers.append(wake)
            asked = self._asked.is_set()
        if asked:
            wake()
        try:
            yield
        finally:
            with self._lock:
                self._wakers.remove(wake)


@contextmanager
def stopped_by_signals(shutdown: Shutdown) -> Iterator[None]:
    """Let the first SIGTERM or SIGINT ask `shutdown`, and the second end the process.

    Python runs signal handlers in the main thread, between two bytecodes: a forward pass can
    keep it from there for seconds. The number of the signal is therefore written to a socket,
    which happens inside the C handler, and a thread of its own reacts.

    Raises: ValueError outside the main thread.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    watcher = threading.Thread(target=_watch, args=(reader, shutdown), name="signals", daemon=True)
    watcher.start()
    old_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    old_handlers = {
        number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(old_fd)
        writer.close()
        watcher.join(_CLOSE_DEADLINE_S)
        reader.close()


def _watch(reader: socket.socket, shutdown: Shutdown) -> None:
    """Read signals until the other end closes."""
    while data := reader.recv(1):
        if data[0] not in STOP_SIGNALS:
            continue
        if shutdown.asked:
            os._exit(128 + data[0])
        shutdown.ask()
