"""How the ranks of a group find each other: each dials those before it, at addresses in a store."""

import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Final, Protocol

from worker_svc.errors import RanksLostError

MEETING_LIMIT_S: Final = 30.0
"""For all connections of a rank."""

GIVE_UP_CHECK_S: Final = 1.0
"""How often one who waits looks whether the group has been given up."""

_GREETING_LIMIT_S: Final = 2.0
"""For the first bytes of one who dials. Ranks send them at once; a stranger holds nobody up."""

_ROOM_FOR_STRANGERS: Final = 64
"""Callers that may wait beside the ranks. One without room tries again after a second or more."""

_TOKEN_BYTES: Final = 16

_GREETING: Final = struct.Struct(f"<{_TOKEN_BYTES}sI")
"""What one who dials says: the word that the store has for those who do, and its rank."""


class Store(Protocol):
    """Where ranks leave word for each other: `torch.distributed` has several of these."""

    def set(self, key: str, value: str) -> None:
        """Keep a value for all ranks. Raises: RuntimeError if the store is gone."""
        ...

    def get(self, key: str) -> bytes:
        """Return a value, once there is one. Raises: RuntimeError if none comes in time."""
        ...


def dial_ranks(
    rank: int, world_size: int, store: Store, host: str, given_up: threading.Event
) -> Iterator[tuple[int, socket.socket]]:
    """Yield a connection to each other rank, which does not block.

    The others give the same store, each with the address of this machine they are reached at.
    Whose greeting is none of this group's is sent away.

    Raises: OSError or RuntimeError if they cannot meet; RanksLostError once `given_up` is set.
    """
    deadline_s = time.monotonic() + MEETING_LIMIT_S
    token = secrets.token_bytes(_TOKEN_BYTES)
    with socket.create_server((host, 0), backlog=world_size + _ROOM_FOR_STRANGERS) as listener:
        store.set(_key(rank), f"{token.hex()} {listener.getsockname()[1]} {host}")
        for other in range(rank):
            word, port, address = store.get(_key(other)).decode().split(" ", 2)
            greeting = _GREETING.pack(bytes.fromhex(word), rank)
            yield other, _dial(address, int(port), greeting, _left_s(deadline_s))
        missing = set(range(rank + 1, world_size))
        while missing:
            connection = _accept(listener, deadline_s, given_up)
            caller = _greeted(connection, token)
            if caller in missing:
                missing.remove(caller)
                yield caller, _ready(connection)
            else:
                connection.close()


def _key(rank: int) -> str:
    return f"exchange/{rank}"


def _left_s(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError(f"not all came within {MEETING_LIMIT_S:g} s")
    return left_s


def _dial(address: str, port: int, greeting: bytes, timeout_s: float) -> socket.socket:
    connection = socket.create_connection((address, port), timeout_s)
    try:
        connection.sendall(greeting)
    except OSError:
        connection.close()
        raise
    return _ready(connection)


def _accept(listener: socket.socket, deadline_s: float, given_up: threading.Event) -> socket.socket:
    while True:
        listener.settimeout(min(GIVE_UP_CHECK_S, _left_s(deadline_s)))
        try:
            return listener.accept()[0]
        except TimeoutError:
            if given_up.is_set():
                raise RanksLostError("the group was given up") from None


def _greeted(connection: socket.socket, token: bytes) -> int | None:
    """Return the rank of one who dialled. None: no rank of this group."""
    deadline_s = time.monotonic() + _GREETING_LIMIT_S
    greeting = b""
    while len(greeting) < _GREETING.size:
        connection.settimeout(max(0.001, deadline_s - time.monotonic()))
        try:
            data = connection.recv(_GREETING.size - len(greeting))
        except OSError:
            return None
        if not data:
            return None
        greeting += data
    word, rank = _GREETING.unpack(greeting)
    return rank if secrets.compare_digest(word, token) else None


def _ready(connection: socket.socket) -> socket.socket:
    """Have small messages leave at once, and nobody wait in a call."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setblocking(False)
    return connection
