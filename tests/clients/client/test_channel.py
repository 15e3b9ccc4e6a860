"""An address is HOST:PORT or unix:PATH, and nothing else is taken for one."""

import pytest

from pagemill.client.channel import Keepalive, check_address


@pytest.mark.parametrize(
    "address", ["127.0.0.1:50051", "localhost:1", "[::1]:65535", "unix:/run/a.sock", "unix:a"]
)
def test_an_address_names_a_port_or_a_socket(address: str) -> None:
    check_address(address)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "localhost",
        ":1",
        "host:",
        "host:0",
        "host:65536",
        "host:x",
        "unix:",
        "http://h:80",
        "h:²",
    ],
)
def test_anything_else_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="address is"):
        check_address(address)


def test_a_keepalive_below_a_second_is_refused() -> None:
    with pytest.raises(ValueError, match="keepalive is"):
        Keepalive(interval_s=0.5)
