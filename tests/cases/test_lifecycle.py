"""Area g of the public cases: ids, cancellations, deadlines and drains."""

import asyncio
import signal
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio

from cases.conftest import Reference
from cases.raw_stream import raw_call
from cases.stack import RecordingHost, RunningWorker, Stack, serving, start_worker, until
from cases.table_llama import successors_of
from grpc_answers import deadlines
from pagemill.client import (
    Accepted,
    AlreadyExistsError,
    CallCancelledError,
    DeadlineExceededError,
    Delta,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
)
from scheduler_process import Answer, generate, is_serving, scheduler, stream, until_serving
from scheduler_svc.service.engine_door import TokenBatch
from scheduler_svc.service.token_stream import RequestStream

ABORTED = ("pagemill_request_success_total", "abort")


def aborts(stack: Stack) -> float:
    return stack.metric(ABORTED[0], finished_reason=ABORTED[1])


async def test_case_G_01_an_id_names_one_live_request(bench_t: Path) -> None:
    async with serving(bench_t, max_model_len=512, num_blocks=256, step_s=0.005) as stack:
        client = stack.client

        async def send(name: str, prompt: int, count: int, n: int = 1) -> list[int]:
            reply = await client.complete(
                request_id=name, prompt=[prompt], temperature=0, max_tokens=count, n=n
            )
            assert len(reply.sequences) == n
            assert {sequence.token_ids for sequence in reply.sequences} == {reply.token_ids}
            return list(reply.token_ids)

        events = client.generate(request_id="id-1", prompt=[10], temperature=0, max_tokens=200)
        got = list[int]()
        async for event in events:
            if isinstance(event, Delta):
                got += event.token_ids
            if len(got) == 5:
                begin = time.monotonic()
                with pytest.raises(AlreadyExistsError, match="id-1"):
                    await send("id-1", 50, 5)
                assert time.monotonic() - begin < 3
        assert got == successors_of(10, 200)
        assert await send("id-1", 60, 5) == successors_of(60, 5)

        # Children have their parent's id, and an index; whatever a client calls its own requests.
        both = await asyncio.gather(
            send("id-1", 10, 20, n=3),
            *(send(name, 70, 5) for name in ("id-1-1", "id-1:1", "id-1/1", "1_id-1", "id-1#1")),
        )
        assert both[0] == successors_of(10, 20)
        assert all(tokens == successors_of(70, 5) for tokens in both[1:])

        named = await client.complete(prompt=[1], temperature=0, max_tokens=1)
        again = await client.complete(prompt=[1], temperature=0, max_tokens=1)
        assert len({"", named.accepted.request_id, again.accepted.request_id}) == 3
        with pytest.raises(InvalidArgumentError, match="request_id"):
            await send("x" * 65_536, 1, 1)
        await stack.idle()


# Prints after the third message, and reads on.
CLIENT = """
import sys
from pagemill.client import Client
with Client(sys.argv[1]) as client:
    for number, _ in enumerate(client.generate(prompt=[1], temperature=0, max_tokens=2000)):
        if number == 2:
            print("three", flush=True)
"""


@pytest.fixture
async def slow(bench_t: Path) -> AsyncIterator[Stack]:
    """A server whose steps take 20 ms."""
    async with serving(bench_t, num_blocks=2048, step_s=0.02, max_num_seqs=64) as stack:
        # The first call makes threads and tasks that stay.
        await stack.client.complete(prompt=[9], temperature=0, max_tokens=1)
        await stack.idle()
        yield stack


async def _three(stack: Stack, number: int = 0) -> None:
    """Read three messages and cancel."""
    events = stack.client.generate(prompt=[number], temperature=0, max_tokens=2000)
    for _ in range(3):
        await anext(events)
    await events.aclose()


async def _is_over(stack: Stack, steps: int, tasks: int, num_aborts: float) -> None:
    """Prove that a call left: within a second (three on a busy machine), and two steps."""
    await stack.idle(within_s=3)
    assert len(stack.steps) - steps <= 2
    assert aborts(stack) == num_aborts
    await until(lambda: len(asyncio.all_tasks()) <= tasks, 3)


async def test_case_G_03_a_cancelled_call_computes_nothing_more(slow: Stack) -> None:
    tasks = len(asyncio.all_tasks())
    events = slow.client.generate(prompt=[0], temperature=0, max_tokens=2000)
    for _ in range(3):
        await anext(events)
    steps = len(slow.steps)
    await events.aclose()
    await _is_over(slow, steps, tasks, 1)

    # The call of a whole answer is cancelled as a stream is.
    whole = asyncio.create_task(
        slow.client.complete(prompt=[0], temperature=0, max_tokens=2000, timeout=60)
    )
    await until(lambda: slow.scheduler.counters.generation_tokens > 10)
    steps = len(slow.steps)
    whole.cancel()
    with pytest.raises(asyncio.CancelledError):
        await whole
    await _is_over(slow, steps, tasks, 2)

    # What the client sees of its own cancellation.
    async with raw_call(slow.address, prompt=[0], temperature=0, max_tokens=2000) as call:
        async for _ in call:
            break
        call.cancel()
        assert await call.code() is grpc.StatusCode.CANCELLED
    await slow.idle(within_s=3)


async def test_case_G_03_fifty_streams_are_cancelled_at_once(slow: Stack) -> None:
    tasks = len(asyncio.all_tasks())
    await asyncio.gather(*(_three(slow, number) for number in range(50)))
    steps = len(slow.steps)
    await _is_over(slow, steps, tasks, 50)


async def test_case_G_03_an_expired_call_computes_nothing_more(slow: Stack) -> None:
    tasks, seen = len(asyncio.all_tasks()), slow.scheduler._next_sequence
    for timeout_s in deadlines(0.3, lambda: slow.scheduler._next_sequence > seen):
        begin = time.monotonic()
        with pytest.raises(DeadlineExceededError):
            await slow.client.complete(
                prompt=[0], temperature=0, max_tokens=2000, timeout=timeout_s
            )
        assert time.monotonic() - begin > 0.8 * timeout_s
    steps = len(slow.steps)
    assert steps < 1000  # of 2000
    await _is_over(slow, steps, tasks, 1)


async def test_case_G_03_a_deadline_in_the_past_never_reaches_the_scheduler(slow: Stack) -> None:
    steps, seen = len(slow.steps), slow.scheduler._next_sequence
    async with raw_call(slow.address, 0.0, prompt=[0], temperature=0, max_tokens=2000) as call:
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    async with raw_call(slow.address, -1.0, prompt=[0], temperature=0, max_tokens=2000) as call:
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await slow.client.load()
    assert (len(slow.steps), slow.scheduler._next_sequence) == (steps, seen)


async def test_case_G_03_a_killed_client_computes_nothing_more(slow: Stack) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", CLIENT, slow.address), stdout=PIPE
    )
    try:
        assert process.stdout is not None
        assert (await asyncio.wait_for(process.stdout.readline(), 60)) == b"three\n"
        steps = len(slow.steps)
    finally:
        process.kill()
        await process.communicate()
    await slow.idle(within_s=3)
    assert len(slow.steps) - steps <= 3  # the kernel closes the connection in the meantime
    assert aborts(slow) == 1


async def test_case_G_03_a_half_closed_call_goes_on(slow: Stack) -> None:
    # Every call of a stream of replies is: the client closes its side behind its one request.
    reply = await slow.client.complete(prompt=[7], temperature=0, max_tokens=20)
    assert list(reply.token_ids) == successors_of(7, 20)
    assert aborts(slow) == 0


async def test_case_G_04_aborts_of_waiting_and_running_requests_disturb_nobody(
    bench_r: Path, reference: Reference
) -> None:
    """Without the tiers' parts: nothing is loaded or stored yet."""
    cached, occupant = list(range(20, 44)), list(range(50, 58))
    async with serving(bench_r, max_num_seqs=1, step_s=0.01, max_model_len=256) as stack:
        client = stack.client
        await client.complete(prompt=cached, temperature=0, max_tokens=1)
        before = await stack.idle()
        running = asyncio.create_task(
            client.complete(
                request_id="runs", prompt=occupant, temperature=0, max_tokens=100, ignore_eos=True
            )
        )
        await until(lambda: stack.scheduler.num_running == 1)
        # Its client leaves while it waits, with five blocks to be hit.
        waits = client.generate(prompt=cached, temperature=0, max_tokens=50)
        assert isinstance(await anext(waits), Accepted)
        assert stack.scheduler.num_waiting == 1
        await waits.aclose()
        await until(lambda: stack.scheduler.num_waiting == 0)

        queued = asyncio.create_task(
            client.complete(request_id="q", prompt=cached, temperature=0, max_tokens=50)
        )
        await until(lambda: stack.scheduler.num_waiting == 1)
        assert (await client.abort(["q"])).aborted == ("q",)
        assert (await queued).finish_reason == "abort"
        for name in ("q", "nobody"):
            with pytest.raises(NotFoundError):
                await client.abort([name])
        reply = await running
        assert list(reply.token_ids) == reference(occupant, 100)
        # In the middle of its prompt, in the middle of its output.
        for tokens in (0, 5):
            events = client.generate(request_id="m", prompt=cached, temperature=0, max_tokens=50)
            got = 0
            async for event in events:
                got += len(event.token_ids) if isinstance(event, Delta) else 0
                if got >= tokens:
                    break
            await client.abort(["m"])
            await events.aclose()
            await stack.idle()
        after = await stack.idle()
        assert after.total_blocks == before.total_blocks


async def test_case_G_04_a_cancellation_of_the_servers_own_ends_the_call(
    slow: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cancelled(_stream: RequestStream) -> TokenBatch:
        raise asyncio.CancelledError

    monkeypatch.setattr(RequestStream, "__anext__", cancelled)
    begin = time.monotonic()
    with pytest.raises((InternalError, CallCancelledError)):
        await slow.client.complete(prompt=[1], temperature=0, max_tokens=2000)
    assert time.monotonic() - begin < 3
    await slow.idle(within_s=3)


# G-07: the scheduler as a process of its own, a worker with steps of 20 ms in a thread.


class Drained:
    """A scheduler process that serves bench T."""

    def __init__(self, model: Path, *flags: str) -> None:
        self._model, self._flags = model, flags

    async def __aenter__(self) -> "Drained":
        flags = ("--num-gpu-blocks-override", "4096", "--max-num-seqs", "5", *self._flags)
        async with AsyncExitStack() as stack:
            workers = list[RunningWorker]()

            async def stop_workers() -> None:
                for worker in workers:
                    await asyncio.to_thread(worker.stop)

            stack.push_async_callback(stop_workers)
            self.process = await stack.enter_async_context(scheduler(self._model, *flags))
            self.worker = start_worker(RecordingHost(self._model, None, 0.02), self.process.workers)
            workers.append(self.worker)
            channel = aio.insecure_channel(self.process.address)
            self.channel = await stack.enter_async_context(channel)
            await until_serving(self.channel)
            self._open = stack.pop_all()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._open.__aexit__(*error)


async def test_case_G_07_a_drain_lets_running_and_queued_requests_end(bench_t: Path) -> None:
    async with Drained(bench_t, "--drain-timeout", "10") as served:
        calls = [asyncio.create_task(generate(served.channel, [p], 100)) for p in range(8)]
        await until(lambda: len(served.worker.host.steps) > 10)
        # Five run, three wait.
        assert len(served.worker.host.steps[-1]) == 5
        begin = time.monotonic()
        served.process.send(signal.SIGTERM)
        await until_serving(served.channel, serving=False)
        refused_at = time.monotonic()
        refused = await generate(served.channel, [50], 5)
        assert time.monotonic() - refused_at < 3
        assert (refused.code, refused.tokens) == (grpc.StatusCode.UNAVAILABLE, [])
        assert not await is_serving(served.channel)
        answers = await asyncio.gather(*calls)
        assert [answer.code for answer in answers] == [grpc.StatusCode.OK] * 8
        assert [answer.tokens for answer in answers] == [successors_of(p, 100) for p in range(8)]
        status, _, log = await served.process.end()
        assert (status, "Traceback" in log) == (0, False)
        assert time.monotonic() - begin < 12


async def test_case_G_07_at_the_drain_limit_a_long_stream_keeps_what_it_has(bench_t: Path) -> None:
    """The limit is 1 second, so that the test does not take 10."""
    async with Drained(bench_t, "--drain-timeout", "1", "--max-model-len", "131072") as served:
        answer = Answer([])
        reading = asyncio.create_task(_read(served.channel, answer))
        await until(lambda: len(served.worker.host.steps) > 5)
        begin, steps = time.monotonic(), len(served.worker.host.steps)
        served.process.send(signal.SIGTERM)
        await reading
        assert time.monotonic() - begin > 0.9
        # It was not late, either: fifty steps take a second.
        assert len(served.worker.host.steps) - steps < 150
        assert answer.code is grpc.StatusCode.UNAVAILABLE
        assert len(answer.tokens) > 10
        assert answer.tokens == successors_of(1, len(answer.tokens))
        assert (await served.process.end())[0] == 0


async def _read(channel: aio.Channel, answer: Answer) -> None:
    async for _ in stream(channel, [1], 10_000, answer):
        pass


async def test_case_G_07_a_second_signal_ends_it_at_once_in_good_order(bench_t: Path) -> None:
    async with Drained(bench_t, "--drain-timeout", "10") as served:
        call = asyncio.create_task(generate(served.channel, [1], 2000))
        await until(lambda: len(served.worker.host.steps) > 5)
        begin = time.monotonic()
        served.process.send(signal.SIGTERM)
        await until_serving(served.channel, serving=False)
        served.process.send(signal.SIGTERM)
        status, _, log = await served.process.end()
        assert time.monotonic() - begin < 9
        assert (status, "Traceback" in log) == (1, False)
        assert (await call).code is not grpc.StatusCode.OK
