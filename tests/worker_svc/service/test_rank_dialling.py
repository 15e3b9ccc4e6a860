"""Ranks find each other through a store, and nobody else."""

import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch._C._distributed_c10d import HashStore

from worker_svc.errors import RanksLostError
from worker_svc.service import rank_dialling
from worker_svc.service.rank_dialling import dial_ranks
from worker_svc.service.rank_sockets import RankSockets

LIMIT_S = 30.0
HOST = "127.0.0.1"


def connections(rank: int, store: HashStore, world_size: int) -> dict[int, socket.socket]:
    return dict(dial_ranks(rank, world_size, store, HOST, threading.Event()))


def test_every_rank_gets_a_connection_to_each_other() -> None:
    store = HashStore()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda rank: connections(rank, store, 4), range(4)))
    for rank, others in enumerate(found):
        assert sorted(others) == [other for other in range(4) if other != rank]
        for other, connection in others.items():
            assert connection.getpeername() == found[other][rank].getsockname()
    for others in found:
        for connection in others.values():
            connection.close()


def test_strangers_are_sent_away_and_hold_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_dialling, "_GREETING_LIMIT_S", 0.1)
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(connections, 0, store, 2)
        word, port, _ = store.get("exchange/0").decode().split()
        strangers = [socket.create_connection((HOST, int(port)), LIMIT_S) for _ in range(5)]
        greetings = [
            b"",  # says nothing
            b"GET / HTTP/1.1\r\n\r\n",
            bytes(16) + bytes([1, 0, 0, 0]),  # another group's word
            bytes.fromhex(word) + bytes([7, 0, 0, 0]),  # a rank that is not expected
        ]
        for stranger, greeting in zip(strangers, greetings, strict=False):
            stranger.sendall(greeting)
        strangers[4].close()
        second = pool.submit(connections, 1, store, 2)
        one, two = first.result(LIMIT_S)[1], second.result(LIMIT_S)[0]
    assert one.getpeername() == two.getsockname()
    for stranger in strangers[:4]:
        with contextlib.suppress(ConnectionResetError):  # where it had said more than was read
            assert stranger.recv(1) == b""
        stranger.close()
    one.close()
    two.close()


def test_who_waits_for_a_rank_that_never_comes_ends_when_the_group_is_given_up() -> None:
    given_up = threading.Event()
    given_up.set()
    started = time.monotonic()
    with pytest.raises(RanksLostError, match="given up"):
        RankSockets(0, HashStore(), 2, HOST, given_up)
    assert time.monotonic() - started < 10  # of 30 that a meeting may take


def test_a_rank_that_never_comes_is_waited_for_no_longer_than_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_dialling, "MEETING_LIMIT_S", 0.1)
    with pytest.raises(RanksLostError, match=r"could not meet: not all came within 0\.1 s"):
        RankSockets(0, HashStore(), 2, HOST, threading.Event())


def test_an_address_of_another_machine_is_no_place_to_meet() -> None:
    with pytest.raises(RanksLostError, match="could not meet"):
        RankSockets(0, HashStore(), 2, "192.0.2.1", threading.Event())


def test_a_rank_whose_address_nobody_listens_at_any_more_is_lost() -> None:
    store = HashStore()
    with socket.create_server((HOST, 0)) as gone:
        port = gone.getsockname()[1]
    store.set("exchange/0", f"{'00' * 16} {port} {HOST}")
    with pytest.raises(RanksLostError, match="could not meet"):
        RankSockets(1, store, 2, HOST, threading.Event())
