"""Adapters come and go beside the steps: files are read in a thread of their own."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Protocol

from pagemill.v1 import worker_pb2
from worker_svc.errors import AdapterError
from worker_svc.model.adapters import LoadedAdapter
from worker_svc.service.logs import Logger

Answer = Callable[[worker_pb2.AdapterAnswer], None]


class AdapterHost(Protocol):
    """A model's adapters, by slot."""

    def read(self, path: str) -> LoadedAdapter:
        """Return the adapter of a directory. From any thread.

        Raises: AdapterError.
        """
        ...

    def publish(self, slot: int, adapter: LoadedAdapter) -> None:
        """Put an adapter into a slot. From any thread."""
        ...

    def drop(self, slot: int) -> None:
        """Empty a slot."""
        ...

    def generation(self, slot: int) -> int:
        """Return the generation of what is in a slot. 0: nothing is."""
        ...


class AdapterLoading:
    """Follows the changes that the scheduler wants, in order.

    A drop takes effect at once, between two steps. A load is read by the thread, and answered by
    it; one that a later change of its slot overtook is thrown away. The thread's queue is
    bounded by the scheduler, which has at most one change in flight for a slot.
    """

    def __init__(self, host: AdapterHost, log: Logger) -> None:
        self._host = host
        self._log = log
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="adapters")
        self._latest: dict[int, int] = {}
        """Number of the latest change of each slot."""
        self._lock = threading.Lock()

    def take(self, change: worker_pb2.AdapterChange, answer: Answer) -> None:
        """Follow a change; `answer` is called once for a load, perhaps by the thread."""
        slot, generation = change.adapter, change.generation
        with self._lock:
            self._latest[slot] = change.number
            if not change.path:
                self._host.drop(slot)
        if not change.path:
            return
        if generation and self._host.generation(slot) == generation:
            answer(worker_pb2.AdapterAnswer(number=change.number, generation=generation))
            return
        reading = self._reader.submit(self._host.read, change.path)
        reading.add_done_callback(partial(self._end, change, answer))

    def close(self) -> None:
        """End the thread once it has read what it reads."""
        self._reader.shutdown(wait=False, cancel_futures=True)

    def _end(
        self, change: worker_pb2.AdapterChange, answer: Answer, reading: "Future[LoadedAdapter]"
    ) -> None:
        """Publish what was read, and answer. Whatever went wrong, somebody waits for an answer."""
        if reading.cancelled():
            return
        error = reading.exception()
        if error is not None:
            kind = "" if isinstance(error, AdapterError) else f"{type(error).__name__}: "
            reason = kind + " ".join(str(error).split())
            self._log.warning("adapter not loaded", adapter=change.adapter, reason=reason)
            answer(worker_pb2.AdapterAnswer(number=change.number, error=reason))
            return
        adapter = reading.result()
        with self._lock:
            if self._latest.get(change.adapter) == change.number:
                self._host.publish(change.adapter, adapter)
        self._log.info(
            "adapter loaded",
            adapter=change.adapter,
            path=change.path,
            generation=f"{adapter.generation:016x}",
            mib=round(adapter.num_bytes / 2**20, 1),
        )
        answer(worker_pb2.AdapterAnswer(number=change.number, generation=adapter.generation))
