"""One connection to a server: its address, its limits, and how its death is noticed."""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

_MAX_MESSAGE_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Keepalive:
    """Pings that find out whether the other side still lives."""

    interval_s: float = 30.0
    """Seconds of silence before a ping."""

    timeout_s: float = 10.0
    """Seconds without an answer after which the connection is given up."""

    def __post_init__(self) -> None:
        """Raise ValueError, naming the field, its value and its bound."""
        if self.interval_s < 1 or self.timeout_s <= 0:
            raise ValueError(
                f"keepalive is {self.interval_s} s and {self.timeout_s} s, must be at least 1 s "
                "and above 0 s"
            )


def open_channel(
    address: str,
    keepalive: Keepalive,
    credentials: grpc.ChannelCredentials | None,
) -> grpc.aio.Channel:
    """Return a channel to HOST:PORT or unix:PATH; it connects with the first call.

    Raises: ValueError if the address is neither.
    """
    check_address(address)
    options: Sequence[tuple[str, int]] = (
        ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", int(keepalive.interval_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(keepalive.timeout_s * 1000)),
        # gRPC waits 1 s, then up to 120 s, to dial again; a local server is back sooner.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 5000),
        # A proxy for the internet cannot reach this machine's own ports.
        ("grpc.enable_http_proxy", int(not _is_local(address))),
    )
    if credentials is None:
        return grpc.aio.insecure_channel(address, options)
    return grpc.aio.secure_channel(address, credentials, options)


def check_address(address: str) -> None:
    """Raise ValueError if the text is neither HOST:PORT nor unix:PATH."""
    if address.startswith("unix:"):
        if address == "unix:":
            raise ValueError("address is unix:, must name a socket: unix:PATH")
        return
    host, colon, port = address.rpartition(":")
    is_port = port.isascii() and port.isdigit() and 1 <= int(port) <= 65535
    if not (host and colon and is_port) or "/" in host:
        raise ValueError(f"address is {address!r}, must be HOST:PORT or unix:PATH")


def _is_local(address: str) -> bool:
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
