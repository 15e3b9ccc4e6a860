"""Each rank gets rank 0's plans, whole and in order, and hears of its end."""

import queue
from contextlib import ExitStack

import pytest

from worker_svc.errors import InvariantError, RanksLostError
from worker_svc.service.plan_relay import PlanReceiver, PlanSender, dial_store, open_store

LIMIT_S = 30.0

Heard = queue.SimpleQueue[bytes | RanksLostError]


def test_plans_of_any_size_come_to_every_rank_in_order() -> None:
    store = open_store("127.0.0.1")
    plans = [b"first", b"\0" * (9 << 20), b"third"]
    with ExitStack() as stack:
        heard: list[Heard] = [queue.SimpleQueue(), queue.SimpleQueue()]
        for rank, box in enumerate(heard, start=1):
            mine = dial_store(f"127.0.0.1:{store.port}")
            stack.enter_context(PlanReceiver(mine, rank, box.put, box.put))
        sender = PlanSender(store, world_size=3)
        for plan in plans:
            sender.keep_alive()
            sender.send(plan)
        for box in heard:
            assert [box.get(timeout=LIMIT_S) for _ in plans] == plans
        sender.keep_alive()


def test_the_end_of_rank_0_is_told() -> None:
    store = open_store("127.0.0.1")
    sender = PlanSender(store, world_size=2)
    box: Heard = queue.SimpleQueue()
    with PlanReceiver(dial_store(f"127.0.0.1:{store.port}"), 1, box.put, box.put):
        sender.send(b"plan")
        assert box.get(timeout=LIMIT_S) == b"plan"
        del sender, store
        lost = box.get(timeout=LIMIT_S)
    assert isinstance(lost, RanksLostError)
    assert str(lost).startswith("rank 0 was lost")


@pytest.mark.parametrize("address", ["", "4711", "host:", "host:port"])
def test_what_is_no_address_is_a_broken_promise(address: str) -> None:
    with pytest.raises(InvariantError, match="must be host:port"):
        dial_store(address)


def test_an_address_of_another_machine_cannot_be_served() -> None:
    with pytest.raises(RanksLostError, match=r"no store can be served at 192\.0\.2\.1"):
        open_store("192.0.2.1")
