"""A worker's stream over real gRPC: what fits is served, what does not costs that stream alone."""

import asyncio

import grpc
import numpy as np
import pytest
from google.protobuf.message import Message
from grpc import aio

from engine_door_use import ask, submission, until
from fake_worker import generate_alone
from fake_worker_process import dialled, hello, wire_result, working
from loop_clock import LoopClock, turn
from pagemill.v1 import worker_pb2
from scheduler_svc.core.step_plan import StepResult
from scheduler_svc.service.group_events import StepArrived
from scheduler_svc.service.worker_link import WorkerLink
from worker_listener import NUM_BLOCKS, PROMPT, fake_worker, listening


@pytest.mark.parametrize("depth", [1, 2])
async def test_tokens_over_the_wire_are_those_of_each_request_alone(depth: int) -> None:
    prompts = [[i % 3, *(j % 3 for j in range(i)), 1] for i in range(8)]
    async with listening(depth=depth) as listener, working(listener.address, fake_worker()):
        await until(listener.ready)
        answers = await asyncio.gather(
            *(ask(listener.engine, f"r{i}", prompt, 6 + i) for i, prompt in enumerate(prompts))
        )
    assert answers == [generate_alone(p, 6 + i, frozenset()) for i, p in enumerate(prompts)]


async def test_a_silent_worker_is_lost_after_three_heartbeats() -> None:
    async with listening(heartbeat_s=0.02) as listener:
        async with dialled(listener.address) as connection:
            await connection.ready(NUM_BLOCKS)
            await until(listener.ready)
            code, details = await connection.status()
            assert code is grpc.StatusCode.ABORTED
            assert "no heartbeat for" in details
            assert listener.lost()
        async with working(listener.address, fake_worker()):
            await until(listener.ready)


class Owner:
    """A group that only counts who has gone."""

    def __init__(self) -> None:
        self.gone: list[str] = []

    def rank_loaded(self, link: WorkerLink, rendezvous_port: int) -> None:
        raise AssertionError(f"a group of one rank has no rendezvous, {rendezvous_port}")

    def worker_ready(self, link: WorkerLink, ready: worker_pb2.WorkerReady) -> None:
        pass

    def step_arrived(self, link: WorkerLink, step: StepArrived) -> None:
        pass

    def adapter_answered(self, link: WorkerLink, answer: worker_pb2.AdapterAnswer) -> None:
        pass

    def num_plans_sent(self) -> int:
        return 0

    def worker_gone(self, link: WorkerLink, reason: str) -> None:
        self.gone.append(reason)


HEARTBEAT = worker_pb2.JoinRequest(
    heartbeat=worker_pb2.Heartbeat(phase=worker_pb2.WORKER_PHASE_RUNNING)
).SerializeToString()


async def test_a_worker_that_speaks_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, owner = LoopClock(monkeypatch), Owner()
    link = WorkerLink(hello(), worker_pb2.JoinAck(heartbeat_s=10.0), owner)
    for _ in range(10):
        await clock.pass_(25.0)
        link.receive(HEARTBEAT)
    assert owner.gone == []
    link.close("the test is over")
    assert owner.gone == ["the test is over"]


async def test_a_scheduler_that_slept_itself_gives_its_worker_another_heartbeat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, owner = LoopClock(monkeypatch), Owner()
    link = WorkerLink(hello(), worker_pb2.JoinAck(heartbeat_s=10.0), owner)
    clock.jump(50.0)
    await turn()
    assert owner.gone == []
    link.receive(HEARTBEAT)
    assert link.state().phase == "running"
    await clock.pass_(40.0)
    assert "no heartbeat for" in owner.gone[0]


async def test_a_stop_as_long_as_the_limit_costs_no_worker_that_spoke_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, owner = LoopClock(monkeypatch), Owner()
    link = WorkerLink(hello(), worker_pb2.JoinAck(heartbeat_s=10.0), owner)
    # The worker, stopped as well, spoke a while ago.
    for pause_s in (8.0, 25.0, 31.0):
        link.receive(HEARTBEAT)
        await clock.pass_(7.5)
        clock.jump(pause_s)
        await turn()
        assert owner.gone == []
    link.close("the test is over")


def tampered(plan: worker_pb2.StepPlan, **changes: object) -> worker_pb2.JoinRequest:
    token = StepResult(plan.step_id, np.array([1], dtype=np.int32))
    result = wire_result(token, plan.epoch)
    for name, value in changes.items():
        if isinstance(value, Message):
            getattr(result, name).CopyFrom(value)
        elif isinstance(value, list):
            getattr(result, name).extend(value)
        else:
            setattr(result, name, value)
    return worker_pb2.JoinRequest(result=result)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"step_id": 1}, "result is of step 1, expected 0"),
        ({"tokens": b"\1\0\0"}, "tokens has 3 bytes"),
        ({"tokens": b"\7\0\0\0"}, "tokens go from 7 to 7, must be 0 to 2"),
        ({"tokens": b""}, "step 0 gave 0 tokens, expected 1"),
        ({"rows": b"\x63\0\0\0"}, "step 0 gave tokens of rows that do not sample"),
        ({"errors": [worker_pb2.RowError(row=99)]}, "step 0 failed rows [99], not in it"),
        ({"epoch": worker_pb2.Epoch(incarnation=5, number=1)}, "which has not begun"),
        ({"timing": worker_pb2.StepTiming(execute_ns=2**64 - 1)}, "timing is longer"),
    ],
)
async def test_a_result_that_does_not_fit_costs_its_worker_the_stream_alone(
    changes: dict[str, object], complaint: str
) -> None:
    async with listening() as listener:
        async with working(listener.address, fake_worker()) as connection:
            connection.gate.clear()
            asking = asyncio.create_task(ask(listener.engine, "r", PROMPT, 5))
            await until(lambda: bool(connection.plans))
            await connection.send(result=tampered(connection.plans[0], **changes).result)
            code, details = await connection.status()
            assert code is grpc.StatusCode.ABORTED
            assert complaint in details
        async with working(listener.address, fake_worker(), hello(boot_id=2)):
            assert await asking == generate_alone(PROMPT, 5, frozenset())


async def test_a_result_of_an_older_epoch_is_dropped() -> None:
    async with listening() as listener, working(listener.address, fake_worker()) as connection:
        connection.gate.clear()
        asking = asyncio.create_task(ask(listener.engine, "r", PROMPT, 5))
        await until(lambda: bool(connection.plans))
        old = tampered(connection.plans[0])
        old.result.epoch.number = 0
        await connection.send(result=old.result)
        connection.gate.set()
        assert await asking == generate_alone(PROMPT, 5, frozenset())


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ({"hello": hello()}, "hello was not expected"),
        ({"ready": worker_pb2.WorkerReady(num_blocks=1)}, "ready came twice"),
        ({}, "kind None was not expected"),
        ({"failure": worker_pb2.WorkerFailure(reason="no memory")}, "no memory"),
        ({"failure": worker_pb2.WorkerFailure(reason="x" * 100_000)}, "failed for now: xxx"),
    ],
)
async def test_a_message_out_of_turn_ends_the_stream(
    message: dict[str, object], complaint: str
) -> None:
    async with listening() as listener, dialled(listener.address) as connection:
        await connection.ready(NUM_BLOCKS)
        await until(listener.ready)
        await connection.send(**message)
        code, details = await connection.status()
        assert code is grpc.StatusCode.ABORTED
        assert complaint in details
        assert listener.lost()


async def raw_refusal(address: str, first: bytes) -> tuple[grpc.StatusCode, str]:
    async with aio.insecure_channel(address) as channel:
        join: aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(
            "/pagemill.v1.Worker/Join"
        )
        call = join()
        await call.write(first)
        async with asyncio.timeout(10):
            return await call.code(), await call.details()


@pytest.mark.parametrize("first", [b"\xff\xff", b"", b"(dp0\n."])
async def test_bytes_that_are_no_hello_are_refused(first: bytes) -> None:
    async with listening() as listener:
        code, _ = await raw_refusal(listener.address, first)
        assert code is grpc.StatusCode.ABORTED
        assert not listener.group.state().workers


async def test_leaving_a_request_frees_its_blocks_while_a_step_is_in_flight() -> None:
    async with listening() as listener, working(listener.address, fake_worker()) as connection:
        await until(listener.ready)
        connection.gate.clear()
        async with listener.engine.open(submission("r", PROMPT, 50)):
            await until(lambda: bool(connection.plans))
        assert listener.scheduler.pool is not None
        assert listener.scheduler.pool.num_used == 0
        connection.gate.set()
        assert await ask(listener.engine, "next", PROMPT, 5) == generate_alone(
            PROMPT, 5, frozenset()
        )
