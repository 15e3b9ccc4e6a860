"""Over real gRPC a subscriber has the index of a real engine whenever that is quiet."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import grpc
import pytest
from grpc import aio

from engine_bench import NUM_BLOCKS, Bench, running
from engine_door_use import ask, until
from front_end_loopback import front_end, loopback
from kv_replica import KvReplica
from pagemill.v1.control_pb2 import SubscribeKvEventsRequest, SubscribeKvEventsResponse
from pagemill.v1.control_pb2_grpc import ControlStub
from scheduler_bench import ROOT
from scheduler_svc.core.hash_algorithms import SHA256
from scheduler_svc.core.kv_events import KvEventLog
from scheduler_svc.core.kv_memory import KvMemory
from scheduler_svc.service.kv_event_feed import KvEventFeed
from scheduler_svc.service.public_services import add_public_services

if TYPE_CHECKING:  # the stubs for a channel of grpc.aio exist for the type checker only
    from pagemill.v1.control_pb2_grpc import ControlAsyncStub

FIRST = 5000


class Subscriber:
    """Reads a call in the background, and keeps a replica."""

    def __init__(self, control: "ControlAsyncStub", start: int | None) -> None:
        self.replica = KvReplica(SHA256, ROOT)
        self.next = start
        self.snapshots = 0
        self._call = control.SubscribeKvEvents(SubscribeKvEventsRequest(from_sequence=start))
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._call:
            self._take(message)

    def _take(self, message: SubscribeKvEventsResponse) -> None:
        assert message.events
        self.replica.apply_message(message)
        if message.snapshot:
            self.snapshots += 1
            self.next = message.sequence
        else:
            assert message.sequence == self.next
            self.next += len(message.events)

    async def leave(self) -> None:
        self._call.cancel()
        await asyncio.wait([self._reading])


@asynccontextmanager
async def served(max_events: int = 1000) -> "AsyncIterator[tuple[Bench, ControlAsyncStub]]":
    """Serve a real engine that tells its events."""
    feed = KvEventFeed(max_events, FIRST)
    bench = Bench(memory=KvMemory(events=KvEventLog()), feed=feed)
    server = aio.server()
    add_public_services(server, bench.engine, front_end(), feed)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    try:
        await server.start()
        async with running(bench), aio.insecure_channel(address) as channel:
            yield bench, ControlStub(channel)
    finally:
        await server.stop(None)


async def settled(bench: Bench, subscriber: Subscriber) -> None:
    """Wait until a subscriber has all that has happened; then it has the index."""
    pool = bench.scheduler.pool
    assert pool is not None
    await until(lambda: subscriber.replica.names.keys() == pool._index.keys())


async def test_a_subscriber_has_the_index_after_everything_that_changes_it() -> None:
    async with served() as (bench, control):
        early = Subscriber(control, None)
        await until(lambda: early.snapshots == 1)
        await asyncio.gather(*(ask(bench.door, f"r{i}", [i % 3, 1] * i, 9) for i in range(1, 9)))
        await settled(bench, early)
        assert early.replica.names
        late = Subscriber(control, None)
        await settled(bench, late)
        assert early.replica.names == late.replica.names

        # Three prompts that fill the pool: evictions.
        for number in (0, 1, 2):
            await ask(bench.door, "scan", [number] * 100, 5)
        await settled(bench, early)
        bench.engine.flush_cache()
        await until(lambda: not early.replica.names)

        await ask(bench.door, "again", [1] * 20, 5)
        await settled(bench, early)
        assert early.replica.names
        bench.group.leave()
        await until(lambda: not bench.engine.serving)
        bench.group.join(NUM_BLOCKS)
        await until(lambda: not early.replica.names)
        await settled(bench, late)
        await early.leave()
        await late.leave()


async def test_who_comes_back_with_its_number_misses_nothing() -> None:
    async with served() as (bench, control):
        first = Subscriber(control, None)
        await until(lambda: first.snapshots == 1)
        await ask(bench.door, "a", [1] * 20, 5)
        await settled(bench, first)
        await first.leave()
        await ask(bench.door, "b", [2] * 20, 5)
        second = Subscriber(control, first.next)
        second.replica = first.replica
        await settled(bench, second)
        assert second.snapshots == 0
        await second.leave()


async def test_a_number_of_an_earlier_server_gives_a_snapshot() -> None:
    async with served() as (bench, control):
        await ask(bench.door, "a", [1] * 20, 5)
        old = Subscriber(control, FIRST - 1)
        await until(lambda: old.snapshots == 1)
        await settled(bench, old)
        await old.leave()


async def test_a_reader_that_lags_too_far_is_ended_and_nobody_else() -> None:
    async with served(max_events=4) as (bench, control):
        slow = aiter(control.SubscribeKvEvents(SubscribeKvEventsRequest()))
        assert (await anext(slow)).snapshot
        # More than is kept, in one turn of the loop.
        for _ in range(8):
            bench.scheduler.flush_cache()
        bench.engine.flush_cache()
        with pytest.raises(aio.AioRpcError) as ended:
            await asyncio.wait_for(anext(slow), 20)
        assert ended.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await ask(bench.door, "a", [1] * 20, 5)


async def test_with_events_off_the_call_says_so() -> None:
    async with loopback() as quiet:
        call = quiet.control.SubscribeKvEvents(SubscribeKvEventsRequest())
        with pytest.raises(aio.AioRpcError, match="see enable_kv_cache_events") as refused:
            await anext(aiter(call))
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
