"""A thread that says again and again that the worker is alive, whatever the main thread does."""

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from pagemill.v1 import worker_pb2
from worker_svc.service.worker_status import WorkerStatus

_CLOSE_DEADLINE_S = 5.0


class HeartbeatThread:
    """Sends the status at once and then once a period, until its block is left."""

    def __init__(
        self,
        status: WorkerStatus,
        send: Callable[[worker_pb2.Heartbeat], None],
        period_s: float,
    ) -> None:
        self._status = status
        self._send = send
        self._period_s = period_s
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> Self:
        """Start beating."""
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop beating."""
        self._closed.set()
        self._thread.join(_CLOSE_DEADLINE_S)

    def _beat(self) -> None:
        self._send(self._status.heartbeat(time.monotonic_ns()))
        while not self._closed.wait(self._period_s):
            self._send(self._status.heartbeat(time.monotonic_ns()))
