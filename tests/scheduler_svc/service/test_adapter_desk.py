"""Adapters at the desk: one name, one content, whatever workers and callers do meanwhile."""

import asyncio
from collections.abc import Sequence

import grpc
import pytest

from pagemill.v1 import worker_pb2
from scheduler_svc.core.errors import (
    AdapterLoadError,
    AdapterSlotsError,
    UnavailableError,
    UnknownAdapterError,
)
from scheduler_svc.service.adapter_desk import AdapterDesk
from scheduler_svc.service.adapter_door import AdapterState
from scheduler_svc.service.group_events import AdapterLost


class Link:
    """A worker that answers when a test says so."""

    def __init__(self, desk: AdapterDesk) -> None:
        self.desk = desk
        self.changes: list[worker_pb2.AdapterChange] = []
        self.ready: list[Sequence[AdapterLost]] = []
        self.failures: list[str] = []

    def send_adapter(self, change: worker_pb2.AdapterChange) -> None:
        self.changes.append(change)

    def fail(self, code: grpc.StatusCode, reason: str) -> None:
        self.failures.append(reason)

    def join(self) -> None:
        self.desk.join(self, self.ready.append)

    def answer(self, generation: int, error: str = "", back: int = 1) -> None:
        """Answer the last load but `back - 1`."""
        loads = [change for change in self.changes if change.path]
        self.desk.answer(
            self,
            worker_pb2.AdapterAnswer(
                number=loads[-back].number, generation=generation, error=error
            ),
        )

    def told(self) -> list[tuple[int, str, int]]:
        """Take what was sent: slot, path, generation."""
        changes, self.changes = self.changes, []
        return [(change.adapter, change.path, change.generation) for change in changes]


async def begun(desk: AdapterDesk, name: str, path: str) -> "asyncio.Task[int]":
    """Begin a load, which is sent when this returns."""
    task = asyncio.create_task(desk.load(name, path))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return task


async def load(desk: AdapterDesk, links: Sequence[Link], name: str, generation: int) -> int:
    task = await begun(desk, name, name)
    for link in links:
        link.answer(generation)
    return await task


async def test_a_load_ends_when_every_worker_has_it() -> None:
    desk = AdapterDesk(2)
    links = [Link(desk), Link(desk)]
    for link in links:
        link.join()
        assert link.ready == [[]]
    task = await begun(desk, "poet", "poets/one")
    assert [link.told() for link in links] == [[(1, "poets/one", 0)]] * 2
    change = worker_pb2.AdapterAnswer(number=1, generation=7)
    desk.answer(links[0], change)
    await asyncio.sleep(0)
    assert not task.done()
    with pytest.raises(UnknownAdapterError), desk.using("poet"):
        pass
    desk.answer(links[1], change)
    assert await task == 7
    assert desk.loaded() == (AdapterState("poet", 7),)
    with desk.using("poet") as adapter:
        assert adapter is not None
        assert (adapter.slot, adapter.generation) == (1, 7)
    with desk.using("") as none:
        assert none is None


async def test_workers_that_find_different_contents_load_nothing() -> None:
    desk = AdapterDesk(2)
    links = [Link(desk), Link(desk)]
    for link in links:
        link.join()
    task = await begun(desk, "poet", "p")
    for link, generation in zip(links, (7, 8), strict=True):
        link.answer(generation)
    with pytest.raises(AdapterLoadError, match="different contents"):
        await task
    assert [link.told()[-1] for link in links] == [(1, "", 0)] * 2
    assert await load(desk, links, "poet", 9) == 9


async def test_a_call_that_is_given_up_leaves_its_slot_free() -> None:
    desk = AdapterDesk(1)
    link = Link(desk)
    link.join()
    task = await begun(desk, "poet", "p")
    late = link.changes[-1].number
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert link.told() == [(1, "p", 0), (1, "", 0)]
    # Its late answer is nobody's.
    desk.answer(link, worker_pb2.AdapterAnswer(number=late, generation=3))
    assert desk.loaded() == ()
    assert await load(desk, [link], "cook", 4) == 4


async def test_a_worker_that_is_lost_while_it_loads_ends_the_call() -> None:
    desk = AdapterDesk(1)
    link = Link(desk)
    link.join()
    task = await begun(desk, "poet", "p")
    desk.leave(link)
    with pytest.raises(UnavailableError, match="lost while it loaded"):
        await task
    with pytest.raises(UnavailableError, match="no worker is ready"):
        await desk.load("poet", "p")


async def test_one_call_at_a_time_loads_a_name_and_slots_are_bounded() -> None:
    desk = AdapterDesk(2)
    link = Link(desk)
    link.join()
    task = await begun(desk, "poet", "p")
    with pytest.raises(AdapterLoadError, match="being loaded by another call"):
        await desk.load("poet", "q")
    link.answer(1)
    await task
    await load(desk, [link], "cook", 2)
    with pytest.raises(AdapterSlotsError, match=r"2 adapters are loaded.* at most 2 may be"):
        await desk.load("third", "t")


async def test_a_replaced_adapter_stays_until_its_last_request_has_ended() -> None:
    desk = AdapterDesk(2)
    link = Link(desk)
    link.join()
    await load(desk, [link], "poet", 1)
    link.told()
    with desk.using("poet") as first:
        assert await load(desk, [link], "poet", 2) == 2
        with desk.using("poet") as second:
            assert first is not None
            assert second is not None
            assert (first.slot, second.slot) == (1, 2)
        assert link.told() == [(2, "poet", 0)]
        with pytest.raises(AdapterSlotsError, match="still in use"):
            await desk.load("cook", "c")
    assert link.told() == [(1, "", 0)]


async def test_the_same_content_again_keeps_its_slot() -> None:
    desk = AdapterDesk(2)
    link = Link(desk)
    link.join()
    await load(desk, [link], "poet", 1)
    link.told()
    assert await load(desk, [link], "poet", 1) == 1
    assert link.told() == [(2, "poet", 0), (2, "", 0)]
    with desk.using("poet") as adapter:
        assert adapter is not None
        assert adapter.slot == 1


async def test_unloading_refuses_at_once_and_waits_for_the_users() -> None:
    desk = AdapterDesk(1)
    link = Link(desk)
    link.join()
    await load(desk, [link], "poet", 1)
    link.told()
    with desk.using("poet"):
        task = asyncio.create_task(desk.unload("poet"))
        await asyncio.sleep(0)
        assert not task.done()
        with pytest.raises(UnknownAdapterError, match="adapter 'poet' is not loaded; loaded: none"):
            await desk.unload("poet")
        assert link.told() == []
    await task
    assert link.told() == [(1, "", 0)]


async def test_a_worker_that_comes_is_ready_when_it_has_what_others_had() -> None:
    desk = AdapterDesk(3)
    old, new = Link(desk), Link(desk)
    old.join()
    for name, generation in (("poet", 1), ("cook", 2), ("gone", 3)):
        await load(desk, [old], name, generation)
    await desk.unload("gone")
    desk.leave(old)
    new.join()
    assert sorted(new.told()) == [(1, "poet", 1), (2, "cook", 2), (3, "", 0)]
    assert new.ready == []


async def test_what_a_worker_cannot_load_again_is_lost() -> None:
    desk = AdapterDesk(3)
    old, new = Link(desk), Link(desk)
    old.join()
    for name, generation in (("poet", 1), ("cook", 2), ("baker", 3)):
        await load(desk, [old], name, generation)
    desk.leave(old)
    with desk.using("poet"):
        new.join()
        new.answer(0, "the disk is gone", back=3)
        new.answer(9, back=2)
        assert new.ready == []
        new.answer(3, back=1)
        ((poet, cook),) = new.ready
        assert (poet.slot, cook.slot) == (1, 2)
        assert poet.reason == "adapter 'poet' could not be loaded again: the disk is gone"
        assert cook.reason.endswith("what lies at 'cook' has changed: load it again")
        assert [each.name for each in desk.loaded()] == ["baker"]
        # Nobody uses it, so its slot is free at once; the other's when its request has ended.
        assert new.told()[3:] == [(2, "", 0)]
    assert new.told() == [(1, "", 0)]


async def test_a_worker_that_does_not_load_in_time_is_let_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk = AdapterDesk(1)
    old, new = Link(desk), Link(desk)
    old.join()
    await load(desk, [old], "poet", 1)
    desk.leave(old)
    monkeypatch.setattr("scheduler_svc.service.adapter_desk.LOAD_LIMIT_S", 0.01)
    new.join()
    async with asyncio.timeout(10):
        while not new.failures:
            await asyncio.sleep(0.001)
    assert new.failures == ["its adapters were not loaded within 0.01 s"]
    assert new.ready == []


async def test_a_worker_that_comes_during_a_load_takes_part_in_it() -> None:
    """Two ranks are ready one after the other: what the first loads, the second must have."""
    desk = AdapterDesk(2)
    first, second = Link(desk), Link(desk)
    first.join()
    task = await begun(desk, "poet", "poets/one")
    second.join()
    assert second.ready == [[]]
    assert [change.number for change in second.changes] == [first.changes[-1].number]
    first.answer(7)
    await asyncio.sleep(0)
    assert not task.done()
    second.answer(0, "no such file")
    with pytest.raises(AdapterLoadError, match="no such file"):
        await task
    assert [link.told()[-1] for link in (first, second)] == [(1, "", 0)] * 2


async def test_what_goes_while_a_worker_comes_is_not_lost_but_gone() -> None:
    desk = AdapterDesk(2)
    old, new = Link(desk), Link(desk)
    old.join()
    await load(desk, [old], "poet", 1)
    new.join()
    await desk.unload("poet")
    assert new.told() == [(1, "poet", 1), (1, "", 0)]
    cook = await begun(desk, "cook", "c")
    desk.answer(new, worker_pb2.AdapterAnswer(number=2, error="the disk is gone"))
    desk.answer(new, worker_pb2.AdapterAnswer(number=1, error="nobody asked"))
    assert new.ready == [[]]
    for link in (old, new):
        link.answer(2)
    assert await cook == 2
    assert [each.name for each in desk.loaded()] == ["cook"]
