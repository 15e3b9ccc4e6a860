"""A gRPC listener: an address, bounds on messages, rules for pings, and an end in good order."""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from grpc import aio

from scheduler_svc.errors import ConfigError

MAX_MESSAGE_BYTES = 64 * 1024 * 1024

_MAX_PENDING_CALLS = 2**16

# Clients that ping each 10 s while idle are welcome: by default two such pings end a call.
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
    # From 1000 calls on that wait for their handlers, grpc would cancel some without a word; ours
    # refuse them with a status and a sentence.
    ("grpc.server.max_pending_requests", _MAX_PENDING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", _MAX_PENDING_CALLS),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
)

# Ends the connection of a machine that has vanished, and with it a write nobody reads. And no more
# pings than that: to find out what window is best, gRPC would send one with each heartbeat and
# each result, which are answered.
_PEER_OPTIONS = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 4 * 1024 * 1024),
)

LAST_CALLS_S = 1.0
"""Seconds for calls that have been told of their end to pass it on."""


_MAX_SOCKET_PATH_BYTES = 103 if sys.platform == "darwin" else 107


@dataclass(frozen=True, slots=True)
class Listener:
    """A server with a port, not yet started."""

    server: aio.Server

    address: str
    """HOST:PORT with the port that was taken, or unix:PATH."""

    @classmethod
    def bind(cls, field: str, address: str, *, ping_peers: bool = False) -> "Listener":
        """Make a server and take its port; port 0 takes any free one.

        Raises: ConfigError naming `field` if the address cannot be had.
        """
        server = aio.server(options=_OPTIONS + (_PEER_OPTIONS if ping_peers else ()))
        try:
            # grpc would log lines of its own, and take a Unix socket from under a live server.
            _probe(address)
            port = server.add_insecure_port(address)
        except (OSError, RuntimeError) as error:
            raise ConfigError(f"{field} is {address}, which cannot be had: {error}") from error
        if not address.startswith("unix:"):
            address = f"{address.rpartition(':')[0]}:{port}"
        return cls(server, address)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Serve while the block lasts. Calls that run at its end get a moment, not if cancelled."""
        await self.server.start()
        try:
            yield
        except asyncio.CancelledError:
            await self.server.stop(None)
            raise
        finally:
            await self.server.stop(LAST_CALLS_S)


def _probe(address: str) -> None:
    """Raise OSError if an address cannot be listened on."""
    if address.startswith("unix:"):
        _probe_unix(address.removeprefix("unix:"))
        return
    host, _, port = address.rpartition(":")
    places = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    family, kind, protocol, _, place = places[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(place)


def _probe_unix(path: str) -> None:
    """Let a socket that its server left behind be taken over; one that answers is in use.

    Raises: OSError, saying why no socket can be there.
    """
    if len(path.encode()) > _MAX_SOCKET_PATH_BYTES:
        raise OSError(f"its path must have at most {_MAX_SOCKET_PATH_BYTES} bytes")
    place = Path(path)
    if not place.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {place.parent}")
    if not place.exists():
        return
    if not place.is_socket():
        raise FileExistsError(f"{path} is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return
    raise FileExistsError(f"a server listens on {path}")
