"""Ranks exchange bytes of any number, in order, and take no time while they do not."""

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
from torch._C._distributed_c10d import HashStore

from worker_svc.errors import InvariantError, RanksLostError
from worker_svc.service import rank_sockets
from worker_svc.service.rank_sockets import RankSockets

T = TypeVar("T")

LIMIT_S = 30.0


def on_both(run: Callable[[int, RankSockets], T]) -> list[T]:
    """Run a function on two ranks at once, and return what each gave."""
    store = HashStore()

    def run_rank(rank: int) -> T:
        sockets = RankSockets(rank, store, 2, "127.0.0.1", threading.Event())
        try:
            return run(rank, sockets)
        finally:
            sockets.close()

    with ThreadPoolExecutor(2) as pool:
        return [future.result(LIMIT_S) for future in [pool.submit(run_rank, r) for r in (0, 1)]]


def test_bytes_of_any_number_go_both_ways_at_once_and_in_order() -> None:
    # The largest are more than the system takes without being read on the other side.
    sizes = [0, 1, 7, 8, 9, 24 << 20, 3, 0, 24 << 20]

    def run(rank: int, sockets: RankSockets) -> bool:
        rights = []
        for number, size in enumerate(sizes):
            out, into = bytes([number + 10 * rank]) * size, bytearray(size)
            sockets.exchange({1 - rank: memoryview(out)}, {1 - rank: memoryview(into)})
            rights.append(into == bytes([number + 10 * (1 - rank)]) * size)
        return all(rights)

    assert on_both(run) == [True, True]


def test_one_may_send_many_before_the_other_reads_any() -> None:
    def run(rank: int, sockets: RankSockets) -> list[bytes]:
        came = [bytearray(3) for _ in range(20)]
        for number, into in enumerate(came):
            if rank == 0:
                sockets.exchange({1: memoryview(b"%3d" % number)}, {})
            else:
                sockets.exchange({}, {0: memoryview(into)})
        return [bytes(each) for each in came]

    assert on_both(run)[1] == [b"%3d" % number for number in range(20)]


def test_another_number_of_bytes_than_expected_is_a_broken_promise() -> None:
    checked = threading.Event()

    def run(rank: int, sockets: RankSockets) -> str:
        if rank == 0:
            sockets.exchange({1: memoryview(bytes(8))}, {})
            assert checked.wait(LIMIT_S)
            return ""
        try:
            with pytest.raises(InvariantError) as caught:
                sockets.exchange({}, {0: memoryview(bytearray(4))})
        finally:
            checked.set()
        return str(caught.value)

    assert on_both(run)[1] == (
        "rank 0 sent 8 bytes as its exchange 0, where 4 bytes of exchange 0 were expected"
    )


def test_a_rank_that_hangs_is_waited_for_no_longer_than_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_sockets, "EXCHANGE_LIMIT_S", 0.2)
    waited = threading.Event()

    def run(rank: int, sockets: RankSockets) -> str:
        if rank == 1:
            assert waited.wait(LIMIT_S)
            return ""
        try:
            with pytest.raises(RanksLostError) as caught:
                sockets.exchange({}, {1: memoryview(bytearray(4))})
        finally:
            waited.set()
        return str(caught.value)

    assert on_both(run)[0] == "rank 1 took more than 0.2 s for an exchange"


@pytest.mark.skipif(sys.platform != "linux", reason="Linux lists a process's threads")
def test_ranks_that_have_met_have_no_threads_for_it() -> None:
    """A library's thread that looks for work a hundred times a second was half of idle time."""
    before = threads_of_libraries()
    assert all(now <= before for now in on_both(lambda _rank, _sockets: threads_of_libraries()))


def threads_of_libraries() -> set[int]:
    """Return the ids of this process's threads that are none of Python's."""
    threads = {int(name) for name in os.listdir("/proc/self/task")}
    return threads - {thread.native_id for thread in threading.enumerate()}
