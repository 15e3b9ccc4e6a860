"""A worker whose heart beats and whose step hangs loses its connection, and nobody a token."""

import asyncio
import re
import signal
from pathlib import Path

import grpc
import pytest
import uvloop
from grpc import aio

from engine_bench import Bench, running
from engine_door_use import ask, submission, until
from fake_worker import generate_alone
from fake_worker_process import WireWorker, working
from loop_clock import LoopClock
from scheduler_process import Answer, generate, model_hello, scheduler, until_serving, write_model
from scheduler_svc.core.errors import InvariantError
from scheduler_svc.service.step_watchdog import SLOW_FACTOR, StepWatchdog

PROMPT = [1, 2, 0, 1, 1, 2, 0]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


async def test_a_hung_worker_is_dropped_and_its_request_goes_on_with_the_next(
    model: Path,
) -> None:
    async with (
        scheduler(model, "--step-timeout", "0.4") as process,
        aio.insecure_channel(process.address) as channel,
    ):
        async with working(process.workers, WireWorker(4, 400), model_hello(1)) as worker:
            await until_serving(channel)
            asked = asyncio.create_task(
                generate(channel, PROMPT, 60, tenant="a", request_id="hangs")
            )
            async with asyncio.timeout(20):
                while len(worker.plans) < 5:
                    await asyncio.sleep(0.001)
            worker.gate.clear()
            # Its heart beats on: three heartbeats missed would be another reason.
            code, reason = await worker.status()
            assert code is grpc.StatusCode.ABORTED
            told = re.search(r" gave no result for (\d+\.\d) s", reason)
            assert told is not None
            assert float(told[1]) < 20  # of 300 without the flag
            await until_serving(channel, serving=False)
        async with working(process.workers, WireWorker(4, 400), model_hello(2)):
            assert await asked == Answer(generate_alone(PROMPT, 60, frozenset()))
        process.send(signal.SIGTERM)
        status, _, stderr = await process.end()
    assert status == 0
    lines = stderr.splitlines()
    assert any("step hangs" in line for line in lines)
    state = [line for line in lines if "event=state" in line]
    assert any("'hangs' of 'a'" in line for line in state)
    assert any("in flight: 2 steps" in line for line in state)


async def test_without_another_worker_its_requests_are_unavailable_after_the_wait(
    model: Path,
) -> None:
    async with (
        scheduler(model, "--step-timeout", "0.2", "--worker-wait", "0.3") as process,
        aio.insecure_channel(process.address) as channel,
        working(process.workers, WireWorker(4, 400), model_hello()) as worker,
    ):
        await until_serving(channel)
        worker.gate.clear()
        answer = await generate(channel, PROMPT, 5)
    assert (answer.code, answer.tokens) == (grpc.StatusCode.UNAVAILABLE, [])
    assert "no worker has been ready for 0.3 s" in answer.details


async def test_each_result_begins_the_wait_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(Bench(step_timeout_s=30.0)) as bench:
        clock = LoopClock(monkeypatch)
        bench.group.eager = False
        asking = asyncio.create_task(ask(bench.door, "r", [1], 8))
        for _ in range(8):
            await until(lambda: bool(bench.group.plans))
            await clock.pass_(20.0)
            bench.group.answer()
        assert await asking == generate_alone([1], 8, frozenset())
        assert bench.group.dropped == []
        # Who answers no more is dropped.
        asking = asyncio.create_task(ask(bench.door, "r", [1], 8))
        await until(lambda: bool(bench.group.plans))
        await clock.pass_(40.0)
        assert len(bench.group.dropped) == 1
        asking.cancel()


async def test_a_step_may_take_many_times_what_the_slowest_took() -> None:
    hung: list[float] = []
    watchdog = StepWatchdog(0.01, lambda: 0.02, hung.append)
    watchdog.begin()
    await until(lambda: bool(hung))
    assert SLOW_FACTOR * 0.02 <= hung[0] < 5
    watchdog.begin()
    watchdog.rest()
    hung.clear()
    short = StepWatchdog(0.001, lambda: 0.0, hung.append)
    short.begin()
    short.stop()
    await asyncio.sleep(0.05)
    assert hung == []


def test_whatever_the_loops_clock_rounds_a_hung_step_is_noticed() -> None:
    """A timer of uvloop that is due within half a millisecond is no timer."""

    async def hang() -> None:
        for _ in range(40):
            hung: asyncio.Queue[float] = asyncio.Queue()
            StepWatchdog(0.0004, lambda: 0.0, hung.put_nowait).begin()
            async with asyncio.timeout(5):
                await hung.get()

    uvloop.run(hang())


async def test_an_idle_worker_is_never_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(Bench(step_timeout_s=30.0)) as bench:
        clock, wrong = LoopClock(monkeypatch), list[object]()
        asyncio.get_running_loop().set_exception_handler(lambda _, what: wrong.append(what))
        await ask(bench.door, "r", [1], 3)
        await clock.pass_(120.0)
        assert bench.group.dropped == wrong == []


async def test_no_progress_is_told_in_the_log_before_the_loop_ends(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bench = Bench()
    loop = asyncio.create_task(bench.engine.run())
    bench.group.join(8)
    await until(lambda: bench.scheduler.pool is not None)
    assert bench.scheduler.pool is not None
    bench.scheduler.pool.allocate(8)
    async with bench.door.open(submission("stuck", [1])):
        async with asyncio.timeout(10):
            with pytest.raises(InvariantError, match="no progress"):
                await loop
    told = capsys.readouterr().out
    assert "'stuck'" in told
    assert "lacks 1 of 1 blocks" in told
