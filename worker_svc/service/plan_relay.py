"""From rank 0 to the others: each step plan as it came, through a store that rank 0 serves.

The store is that of `torch.distributed` at which the ranks meet. A plan is pushed on a queue of
each rank, so nobody waits for the others here, and a plan's length need not be known beforehand.
"""

import contextlib
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Final, Self

from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import DistError

from worker_svc.errors import InvariantError, RanksLostError

MEETING_LIMIT: Final = timedelta(seconds=30)
"""For reaching the store of rank 0."""

SILENCE_LIMIT: Final = timedelta(seconds=30)
"""Rank 0 says something with each heartbeat, plan or not."""

_PIECE_BYTES: Final = 4 << 20
"""The store takes 8 MiB at a time."""

_MORE: Final = b"\1"
_LAST: Final = b"\0"


def open_store(host: str) -> TCPStore:
    """Serve a store at a free port of one of this machine's addresses: rank 0's part.

    Raises: RanksLostError if the address cannot be had.
    """
    try:
        listener = socket.create_server((host, 0))
        port = listener.getsockname()[1]
        return TCPStore(
            host,
            port,
            is_master=True,
            timeout=MEETING_LIMIT,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    except (OSError, RuntimeError) as error:
        raise RanksLostError(f"no store can be served at {host}: {error}") from error


def dial_store(address: str) -> TCPStore:
    """Connect to the store of rank 0.

    Raises: RanksLostError if nobody answers; InvariantError if it is no address.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise InvariantError(f"the rendezvous is {address!r}, must be host:port")
    try:
        return TCPStore(
            host, int(port), is_master=False, timeout=MEETING_LIMIT, wait_for_workers=False
        )
    except RuntimeError as error:
        raise RanksLostError(f"rank 0 cannot be reached at {address}: {error}") from error


class PlanSender:
    """Rank 0's end."""

    def __init__(self, store: Store, world_size: int) -> None:
        self._store = store
        self._followers = range(1, world_size)

    def send(self, plan: bytes) -> None:
        """Pass a plan on to all other ranks.

        Raises: RanksLostError if the store is gone.
        """
        pieces = [plan[i : i + _PIECE_BYTES] for i in range(0, len(plan), _PIECE_BYTES)]
        try:
            for rank in self._followers:
                for piece in pieces[:-1]:
                    self._store.queue_push(_queue(rank), _MORE + piece)
                self._store.queue_push(_queue(rank), _LAST + pieces[-1])
        except DistError as error:
            raise RanksLostError(f"a plan could not be passed on: {error}") from error

    def keep_alive(self) -> None:
        """Say that there is no plan. One that cannot be said is not missed: the stream ends too."""
        with contextlib.suppress(DistError):
            for rank in self._followers:
                self._store.queue_push(_queue(rank), b"")


class PlanReceiver:
    """Another rank's end: a thread that takes plans while the block lasts."""

    def __init__(
        self,
        store: TCPStore,
        rank: int,
        take: Callable[[bytes], None],
        lose: Callable[[RanksLostError], None],
    ) -> None:
        """Give plans to `take`, in order, and then the end to `lose`, in a thread of our own.

        The store is ours alone: who waits for a queue keeps its connection from all others.
        """
        store.set_timeout(SILENCE_LIMIT)
        self._store = store
        self._queue = _queue(rank)
        self._take = take
        self._lose = lose
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._receive, name="plans", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Take no more. The thread ends with the next word of rank 0, its end, or its silence."""
        self._closed.set()

    def _receive(self) -> None:
        pieces: list[bytes] = []
        while not self._closed.is_set():
            try:
                message = self._store.queue_pop(self._queue)
            except RuntimeError as error:
                if not self._closed.is_set():
                    self._lose(RanksLostError(f"rank 0 was lost: {error}"))
                return
            if not message or self._closed.is_set():
                continue
            pieces.append(message[1:])
            if message[:1] == _LAST:
                self._take(b"".join(pieces))
                pieces = []


def _queue(rank: int) -> str:
    return f"plans/{rank}"
