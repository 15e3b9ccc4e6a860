"""A connection to every other rank of a group, over which all of them exchange bytes at once.

Nothing here has a thread, and nothing happens between two exchanges: ranks that have met and have
no step to run take no time. Who waits sleeps until there are bytes.
"""

import os
import select
import socket
import struct
import threading
import time
from collections.abc import Mapping
from typing import Final

from worker_svc.errors import InvariantError, RanksLostError
from worker_svc.service.rank_dialling import GIVE_UP_CHECK_S, Store, dial_ranks

EXCHANGE_LIMIT_S: Final = 30.0
"""For one exchange: far more than ranks of one step are apart. Only a rank that hangs, or a broken
network, takes so long; one that dies closes its connections."""

WATCH_S: Final = 50e-6
"""How long one looks again and again before it sleeps: waking up takes as long on some machines.
The core goes to whoever else wants it meanwhile."""

_HEADER: Final = struct.Struct("<II")
"""In front of what is sent: its number on this connection (mod 2**32), and its bytes."""


class RankSockets:
    """See the module. One thread calls it."""

    def __init__(
        self, rank: int, store: Store, world_size: int, host: str, given_up: threading.Event
    ) -> None:
        """Meet the others, who give the same store, each with the address they reach it at.

        Once `given_up` is set, whoever waits for another rank ends within a second.

        Raises: RanksLostError if they do not come.
        """
        self._given_up = given_up
        self._channels: dict[int, _Channel] = {}
        try:
            for other, connection in dial_ranks(rank, world_size, store, host, given_up):
                self._channels[other] = _Channel(other, connection)
        except RanksLostError:
            self.close()
            raise
        except (OSError, RuntimeError) as error:
            self.close()
            raise RanksLostError(f"the ranks could not meet: {error}") from error

    def close(self) -> None:
        """Leave the others, who notice."""
        for channel in self._channels.values():
            channel.close()
        self._channels = {}

    def exchange(self, out: Mapping[int, memoryview], into: Mapping[int, memoryview]) -> None:
        """Send bytes to some ranks while filling others' buffers from them.

        Every rank must expect what the others send it, and as many bytes. Returns when everything
        has been taken by the system or come.

        Raises: RanksLostError if one is gone, or takes longer than `EXCHANGE_LIMIT_S`;
            InvariantError if one sends something else.
        """
        deadline_s = time.monotonic() + EXCHANGE_LIMIT_S
        for rank in out.keys() | into.keys():
            self._channels[rank].begin(out.get(rank), into.get(rank))
        # What is sent first is there first: others may be waiting for it.
        for rank in out:
            self._channels[rank].send()
        unfinished = [channel for channel in self._channels.values() if not channel.advance()]
        watch_until_s = time.monotonic() + WATCH_S
        while unfinished:
            if time.monotonic() < watch_until_s:
                os.sched_yield()
            else:
                self._wait(unfinished, deadline_s)
            unfinished = [channel for channel in unfinished if not channel.advance()]

    def _wait(self, channels: "list[_Channel]", deadline_s: float) -> None:
        """Wait until one of them can go on."""
        poll = select.poll()
        for channel in channels:
            poll.register(channel.connection, channel.waits_for())
        while (left_s := deadline_s - time.monotonic()) > 0:
            if poll.poll(min(GIVE_UP_CHECK_S, left_s) * 1e3):
                return
            if self._given_up.is_set():
                raise RanksLostError("the group was given up")
        ranks = ", ".join(str(channel.rank) for channel in channels)
        raise RanksLostError(f"rank {ranks} took more than {EXCHANGE_LIMIT_S:g} s for an exchange")


class _Channel:
    """One other rank, and what is left to send to it and to receive from it."""

    __slots__ = (
        "_expected",
        "_header",
        "_header_left",
        "_into",
        "_num_received",
        "_num_sent",
        "_out",
        "connection",
        "rank",
    )

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank = rank
        self.connection = connection
        self._num_sent = 0
        self._num_received = 0
        self._header = bytearray(_HEADER.size)
        self._header_left = 0
        self._expected = 0
        self._out: list[memoryview] = []
        self._into: list[memoryview] = []

    def begin(self, out: memoryview | None, into: memoryview | None) -> None:
        """Take what is to be sent and what is to be filled, each None for nothing."""
        if out is not None:
            header = _HEADER.pack(self._num_sent, len(out))
            self._num_sent = (self._num_sent + 1) & 0xFFFF_FFFF
            self._out = [memoryview(header), out]
        if into is not None:
            self._expected, self._header_left = len(into), _HEADER.size
            self._into = [memoryview(self._header), into]

    def advance(self) -> bool:
        """Send and receive what goes without waiting. Returns whether that was all."""
        is_sent = self.send()
        return self._receive() and is_sent

    def waits_for(self) -> int:
        """Return the events of `poll` behind which there is more to do."""
        return (select.POLLOUT if self._out else 0) | (select.POLLIN if self._into else 0)

    def send(self) -> bool:
        """Send what goes without waiting. Returns whether that was all."""
        while self._out:
            try:
                num_bytes = self.connection.sendmsg(self._out)
            except BlockingIOError:
                return False
            except OSError as error:
                raise self._lost(error) from error
            self._out = _behind(self._out, num_bytes)
        return True

    def close(self) -> None:
        """Hang up, which the other notices."""
        self.connection.close()

    def _receive(self) -> bool:
        while self._into:
            try:
                num_bytes = self.connection.recvmsg_into(self._into)[0]
            except BlockingIOError:
                return False
            except OSError as error:
                raise self._lost(error) from error
            if num_bytes == 0:
                raise self._lost(None)
            self._into = _behind(self._into, num_bytes)
            if self._header_left:
                self._header_left = max(0, self._header_left - num_bytes)
                if not self._header_left:
                    self._check_header()
        return True

    def _check_header(self) -> None:
        number, num_bytes = _HEADER.unpack(self._header)
        if (number, num_bytes) != (self._num_received, self._expected):
            raise InvariantError(
                f"rank {self.rank} sent {num_bytes} bytes as its exchange {number}, where "
                f"{self._expected} bytes of exchange {self._num_received} were expected"
            )
        self._num_received = (number + 1) & 0xFFFF_FFFF

    def _lost(self, error: OSError | None) -> RanksLostError:
        reason = f": {error.strerror or error}" if error else ""
        return RanksLostError(f"the connection to rank {self.rank} ended{reason}")


def _behind(views: list[memoryview], num_bytes: int) -> list[memoryview]:
    """Return what is left of buffers behind their first bytes, without empty ones."""
    left: list[memoryview] = []
    for view in views:
        if num_bytes < len(view):
            left.append(view[num_bytes:])
        num_bytes = max(0, num_bytes - len(view))
    return left
