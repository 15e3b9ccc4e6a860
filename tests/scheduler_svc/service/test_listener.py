"""An address is taken once, by name or by number; what cannot be had is said with its field."""

import socket
import tempfile

import pytest

from scheduler_svc.errors import ConfigError
from scheduler_svc.service.listener import Listener


async def test_port_0_takes_a_free_port_and_tells_it() -> None:
    listener = Listener.bind("listen", "127.0.0.1:0")
    async with listener.serving():
        host, _, port = listener.address.rpartition(":")
        assert host == "127.0.0.1"
        with socket.create_connection((host, int(port)), timeout=10):
            pass


@pytest.mark.parametrize("address", ["192.0.2.1:50052", "[::2]:1"])
async def test_an_address_of_no_interface_is_refused_by_field(address: str) -> None:
    with pytest.raises(ConfigError) as error:
        Listener.bind("worker_listen", address)
    assert str(error.value).startswith(f"worker_listen is {address}, which cannot be had: ")


async def test_a_port_in_use_is_refused() -> None:
    first = Listener.bind("listen", "127.0.0.1:0")
    async with first.serving():
        with pytest.raises(ConfigError, match="Address already in use"):
            Listener.bind("listen", first.address)


async def test_a_unix_socket_in_use_is_refused_and_a_dead_one_taken_over() -> None:
    # Not below `tmp_path`: the path of a socket has at most 103 bytes on some systems.
    with tempfile.TemporaryDirectory(prefix="pagemill-") as folder:
        path = f"{folder}/socket"
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(path)
        listener = Listener.bind("listen", f"unix:{path}")
        async with listener.serving():
            with pytest.raises(ConfigError, match="a server listens on"):
                Listener.bind("listen", f"unix:{path}")


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("{folder}/" + "x" * 120, "must have at most 10[37] bytes"),
        ("{folder}/nowhere/socket", "there is no folder"),
        ("{folder}", "is no socket"),
    ],
)
async def test_a_path_where_no_socket_can_be_is_refused_by_reason(
    path: str, complaint: str
) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="pagemill-") as folder,
        pytest.raises(ConfigError, match=complaint),
    ):
        Listener.bind("listen", f"unix:{path.format(folder=folder)}")
