"""Pins are made and ended over real gRPC, and every field of the call is checked."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import grpc
import pytest
from grpc import aio
from structlog.testing import capture_logs

from engine_bench import NUM_BLOCKS, Bench, running
from engine_door_use import ask, read, submission, until
from front_end_loopback import Loopback, front_end, loopback
from pagemill.v1.admin_pb2 import FlushCacheRequest, PinRequest, UnpinRequest
from pagemill.v1.admin_pb2_grpc import AdminStub
from pagemill.v1.control_pb2 import GetLoadRequest
from pagemill.v1.control_pb2_grpc import ControlStub
from scheduler_svc.core.block_hash import ExtraKeys
from scheduler_svc.core.errors import PinQuotaError, PrefixNotCachedError
from scheduler_svc.core.kv_memory import KvMemory
from scheduler_svc.service.public_services import add_public_services

if TYPE_CHECKING:  # the stubs for a channel of grpc.aio exist for the type checker only
    from pagemill.v1.admin_pb2_grpc import AdminAsyncStub
    from pagemill.v1.control_pb2_grpc import ControlAsyncStub

PREFIX = [0, 1, 2, 0, 1, 1, 2, 2]


@pytest.fixture
async def served() -> AsyncIterator[Loopback]:
    async with loopback() as served:
        yield served


@asynccontextmanager
async def stubs(bench: Bench) -> "AsyncIterator[tuple[AdminAsyncStub, ControlAsyncStub]]":
    """Serve a real engine."""
    server = aio.server()
    add_public_services(server, bench.engine, front_end())
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    try:
        await server.start()
        async with aio.insecure_channel(address) as channel:
            yield AdminStub(channel), ControlStub(channel)
    finally:
        await server.stop(None)


def wish(**changes: object) -> PinRequest:
    fields = {"token_ids": PREFIX, "time_to_live_s": 60.0, **changes}
    return PinRequest(**fields)  # type: ignore[arg-type]


async def test_a_prefix_is_pinned_and_let_go(served: Loopback) -> None:
    pinned = await served.admin.Pin(wish(model="toy", salt="pepper", tenant="acme"))
    assert (pinned.pin_id, pinned.num_blocks) == ("p1", 2)
    assert served.door.pins == {"p1": (PREFIX, ExtraKeys(b"pepper", b"acme"), 60.0)}
    await served.admin.Unpin(UnpinRequest(pin_id="p1"))
    assert served.door.pins == {}
    with pytest.raises(aio.AioRpcError) as refused:
        await served.admin.Unpin(UnpinRequest(pin_id="p1"))
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    ("changes", "code", "sentence"),
    [
        ({"token_ids": []}, "INVALID_ARGUMENT", "token_ids has 0 ids, must have 1 to 64"),
        ({"token_ids": [1] * 65}, "INVALID_ARGUMENT", "token_ids has 65 ids, must have 1 to 64"),
        ({"token_ids": [1, 272]}, "INVALID_ARGUMENT", "272"),
        ({"time_to_live_s": 0.0}, "INVALID_ARGUMENT", "time_to_live_s is 0.0, must be in (0"),
        ({"time_to_live_s": float("nan")}, "INVALID_ARGUMENT", "time_to_live_s is nan"),
        ({"time_to_live_s": 1e9}, "INVALID_ARGUMENT", "time_to_live_s is 1000000000.0"),
        ({"salt": "x" * 257}, "INVALID_ARGUMENT", "salt has 257 bytes, must have at most 256"),
        ({"model": "other"}, "NOT_FOUND", "model 'other' is not served"),
    ],
)
async def test_a_wrong_field_is_named(
    served: Loopback, changes: dict[str, object], code: str, sentence: str
) -> None:
    with pytest.raises(aio.AioRpcError) as refused:
        await served.admin.Pin(wish(**changes))
    assert refused.value.code().name == code
    assert sentence in str(refused.value.details())
    assert served.door.pins == {}


async def test_quota_and_missing_prefix_have_statuses_of_their_own(served: Loopback) -> None:
    for error, code in (
        (PinQuotaError("full"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (PrefixNotCachedError("no"), grpc.StatusCode.NOT_FOUND),
    ):
        served.door.refuse = error
        with pytest.raises(aio.AioRpcError) as refused:
            await served.admin.Pin(wish())
        assert refused.value.code() is code


async def cached(bench: Bench, prompt: list[int]) -> int:
    async with bench.door.open(submission("cached", prompt, 1)) as stream:
        _, _, account = await read(stream)
    return account.num_cached_tokens


async def test_a_pinned_prefix_stays_in_a_real_engine_until_it_is_let_go() -> None:
    bench = Bench(memory=KvMemory(max_pinned_share=0.25))
    async with running(bench), stubs(bench) as (admin, control):
        await ask(bench.door, "first", [*PREFIX, 1], 2)
        pinned = await admin.Pin(wish(token_ids=[*PREFIX, 7]))
        assert pinned.num_blocks == 2
        assert (await control.GetLoad(GetLoadRequest())).pinned_blocks == 2
        # Three prompts that fill the pool, each different from its first block on.
        for number in (0, 1, 2):
            await ask(bench.door, "scan", [number] * 100, 5)
        assert await cached(bench, [*PREFIX, 1]) == 8
        await admin.Unpin(UnpinRequest(pin_id=pinned.pin_id))
        load = await control.GetLoad(GetLoadRequest())
        assert load.pinned_blocks == 0
        assert load.used_blocks + load.idle_cached_blocks + load.free_blocks == NUM_BLOCKS
        for pin_id in (pinned.pin_id, "", "x", "00-1", pinned.pin_id[:-1] + "²", "-1" * 4000):
            with pytest.raises(aio.AioRpcError) as refused:
                await admin.Unpin(UnpinRequest(pin_id=pin_id))
            assert refused.value.code() is grpc.StatusCode.NOT_FOUND


async def test_an_idle_engine_ends_a_pin_in_time_and_says_so() -> None:
    bench = Bench(memory=KvMemory(max_pinned_share=0.25))
    async with running(bench), stubs(bench) as (admin, control):
        await ask(bench.door, "first", [*PREFIX, 1], 2)
        with capture_logs() as lines:
            await admin.Pin(wish(time_to_live_s=0.05))
            assert (await control.GetLoad(GetLoadRequest())).pinned_blocks == 2
            await until(lambda: bench.memory.pins.num_blocks == 0)
            await until(lambda: any(line["event"] == "pin ended" for line in lines))
        (line,) = [line for line in lines if line["event"] == "pin ended"]
        assert line["cause"] == "expired"


async def test_a_flush_ends_pins_without_any_request() -> None:
    bench = Bench(memory=KvMemory(max_pinned_share=0.25))
    async with running(bench), stubs(bench) as (admin, _):
        await ask(bench.door, "first", [*PREFIX, 1], 2)
        pinned = await admin.Pin(wish())
        await admin.FlushCache(FlushCacheRequest())
        with pytest.raises(aio.AioRpcError, match="may have ended"):
            await admin.Unpin(UnpinRequest(pin_id=pinned.pin_id))


async def test_before_a_worker_has_joined_nothing_is_pinned() -> None:
    bench = Bench(memory=KvMemory(max_pinned_share=0.25))
    async with running(bench, join=False), stubs(bench) as (admin, _):
        with pytest.raises(aio.AioRpcError) as refused:
            await asyncio.wait_for(admin.Pin(wish()), 5)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
