"""Area i of the public cases: metrics and traces."""

import asyncio
import os
import random
import re
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio
from opentelemetry.proto.trace.v1.trace_pb2 import Status
from prometheus_client import generate_latest

from cases.stack import Stack, held, serving, until
from cases.table_llama import successors_of
from grpc_answers import deadlines
from otlp_receiver import Receiver, attributes, otlp_receiver
from pagemill.client import (
    AsyncClient,
    DeadlineExceededError,
    Delta,
    InvalidArgumentError,
    NotFoundError,
    UnimplementedError,
)
from scheduler_svc.core.departure import preempt
from scheduler_svc.core.step_plan import StepPlan
from scheduler_svc.service.step_record import StepRecord
from scheduler_svc.service.tracing import tracing
from source_tree import ROOT

E2E = ("queue_time", "prefill_time", "decode_time")


async def test_case_I_01_tokens_computed_again_are_no_hits(bench_r: Path) -> None:
    rng = random.Random(5)
    prompts = [[rng.randrange(256) for _ in range(16)] for _ in range(20)]
    async with serving(bench_r, num_blocks=24, max_num_seqs=8, preemption_victim="newest") as stack:
        calls = [
            stack.client.complete(prompt=p, temperature=0, max_tokens=20, ignore_eos=True)
            for p in prompts
        ]
        with held(stack):
            tasks = [asyncio.create_task(call) for call in calls]
            await until(lambda: stack.engine.num_live == len(tasks))
        replies = await asyncio.gather(*tasks)
        totals = (await stack.idle()).totals
        assert (totals.prefix_queries, totals.prefix_hits) == (320, 0)
        assert totals.preemptions >= 3
        assert totals.recomputed_tokens > 0
        assert totals.recomputed_tokens == sum(r.usage.recomputed_tokens for r in replies)
        assert all(reply.usage.cached_tokens == 0 for reply in replies)
        assert stack.metric("pagemill_prefix_cache_hits_total") == 0
        assert stack.metric("pagemill_preemptions_total") == totals.preemptions
    async with serving(bench_r) as stack:
        cached = []
        for read_cache in (True, True, False):
            reply = await stack.client.complete(
                prompt=prompts[0],
                temperature=0,
                max_tokens=2,
                ignore_eos=True,
                read_cache=read_cache,
            )
            cached.append(reply.usage.cached_tokens)
        assert cached == [0, 12, 0]
        totals = (await stack.idle()).totals
        assert (totals.prefix_queries, totals.prefix_hits) == (32, 12)


class Raises:
    """An observer that cannot note a step."""

    calls = 0

    def step(self, _record: StepRecord) -> None:
        self.calls += 1
        raise RuntimeError("the sink is full")


async def test_case_I_02_a_sink_that_raises_stops_no_step(
    bench_t: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(bench_t) as stack:
        sink = Raises()
        observers = stack.engine._observers
        observers._observers = (sink, *observers._observers)
        reply = await stack.client.complete(prompt=[1], temperature=0, max_tokens=20)
        assert list(reply.token_ids) == successors_of(1, 20)
        assert stack.metric("pagemill_step_seconds_count") == 20
        # It is told once, and not asked again.
        assert sink.calls == 1
        assert capsys.readouterr().out.count("observer failed") == 1


def _counters(stack: Stack) -> dict[str, float]:
    return {
        f"{sample.name}{sample.labels}": sample.value
        for family in stack.registry.collect()
        if family.type in {"counter", "histogram"}
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


async def test_case_I_02_counters_only_rise_and_count_each_token_once(bench_t: Path) -> None:
    rng = random.Random(7)
    seen: list[dict[str, float]] = []
    delivered = prompts = with_token = 0
    async with serving(
        bench_t,
        num_blocks=40,
        max_num_seqs=8,
        max_num_batched_tokens=16,
        max_model_len=128,
        preemption_victim="newest",
    ) as stack:
        stack.engine._after_turn = lambda _now: seen.append(_counters(stack))

        async def send(prompt: list[int], count: int, leave_at: int | None) -> None:
            nonlocal delivered, with_token
            got = 0
            events = stack.client.generate(prompt=prompt, temperature=0, max_tokens=count)
            async for event in events:
                got += len(event.token_ids) if isinstance(event, Delta) else 0
                if leave_at is not None and got >= leave_at:
                    break
            await events.aclose()
            delivered += got
            with_token += got > 0

        sends = []
        for number in range(40):
            prompt = [number] * rng.randint(1, 40)
            leave_at = rng.randint(1, 8) if number % 4 == 0 else None
            prompts += len(prompt)
            sends.append(send(prompt, rng.randint(8, 30), leave_at))
        await asyncio.gather(*sends)
        totals = (await stack.idle()).totals
        assert totals.preemptions > 0
        for before, after in pairwise(seen):
            assert all(after[name] >= value for name, value in before.items())
        assert totals.prompt_tokens == prompts
        # Tokens that were under way to clients that left are generated, and not delivered.
        assert delivered <= totals.generation_tokens <= delivered + 10 * 10
        assert stack.metric("pagemill_time_to_first_token_seconds_count") == with_token == 40


async def test_case_I_02_times_of_a_preempted_request_add_up(
    bench_t: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preempted once before its first token and twice behind it, in steps of 10 ms."""
    async with serving(
        bench_t, pipeline_depth=1, max_num_batched_tokens=8, max_num_seqs=1, step_s=0.01
    ) as stack:
        plan_step, due = stack.scheduler.schedule, [(1, 0), (4, 2), (7, 4)]

        def preempting(now_ns: int) -> StepPlan | None:
            steps, tokens = len(stack.steps), stack.scheduler.counters.generation_tokens
            if due and steps >= due[0][0] and tokens >= due[0][1]:
                due.pop(0)
                (request,) = stack.scheduler._state.live.values()
                preempt(stack.scheduler._state, request, now_ns)
            return plan_step(now_ns)

        monkeypatch.setattr(stack.scheduler, "schedule", preempting)
        reply = await stack.client.complete(prompt=[3] * 20, temperature=0, max_tokens=10)
        assert list(reply.token_ids) == successors_of(3, 10)
        assert reply.timing.preemptions == 3
        monkeypatch.undo()
        parts = [stack.metric(f"pagemill_request_{part}_seconds_sum") for part in E2E]
        whole = stack.metric("pagemill_e2e_request_latency_seconds_sum")
        assert all(part >= 0 for part in parts)
        assert sum(parts) == pytest.approx(whole, abs=0.005)
        assert stack.metric("pagemill_time_to_first_token_seconds_count") == 1

        # One that leaves before its first token has none, and counts none.
        first = asyncio.create_task(
            stack.client.complete(request_id="first", prompt=[1], temperature=0, max_tokens=30)
        )
        await until(lambda: stack.scheduler.num_running == 1)
        events = stack.client.generate(prompt=[2], temperature=0, max_tokens=30)
        await anext(events)
        await events.aclose()
        await first
        await stack.idle()
        assert stack.metric("pagemill_time_to_first_token_seconds_count") == 2
        assert stack.metric("pagemill_request_success_total", finished_reason="abort") == 1


def test_case_I_02_nothing_is_measured_by_a_clock_that_can_be_set() -> None:
    wall_clock = re.compile(r"\btime\.time(_ns)?\(|datetime\.now\(")
    found = {
        f"{path.relative_to(ROOT)}"
        for folder in ("scheduler_svc", "worker_svc")
        for path in (ROOT / folder).rglob("*.py")
        if wall_clock.search(path.read_text(encoding="utf-8"))
    }
    # The first number of an event feed; and what a chat template may say of today.
    assert found <= {
        "scheduler_svc/service/server.py",
        "scheduler_svc/service/text/chat_template.py",
    }


async def test_case_I_05_no_text_of_a_client_becomes_a_label(bench_t: Path) -> None:
    """Without the part about adapters."""
    rng = random.Random(1)
    async with serving(bench_t) as stack:
        client = stack.client

        async def warm_up() -> None:
            await client.complete(prompt=[1], temperature=0, max_tokens=2)
            with suppress(NotFoundError, InvalidArgumentError):
                await client.complete(model="nobody", prompt=[1])
            with suppress(InvalidArgumentError):
                await client.complete(prompt=[], max_tokens=1)

        await warm_up()
        before = _series(stack)
        evil = 'x"\\\n{}'

        async def attack(number: int) -> None:
            word = f"{evil}{number}{rng.random()}"
            kind = number % 5
            with suppress(NotFoundError, InvalidArgumentError, UnimplementedError):
                if kind == 0:
                    await client.complete(model=word, prompt=[1], max_tokens=1)
                elif kind == 1:
                    await client.complete(
                        request_id=f"id{number}", salt=word, prompt=[1], max_tokens=1
                    )
                elif kind == 2:
                    await client.complete(priority=number, stop=word, prompt=[1], max_tokens=1)
                elif kind == 3:
                    await client.complete(tenant=f"tenant-{number}", prompt=[1], max_tokens=1)
                else:
                    await _unknown_method(stack, f"Evil{number}")

        for first in range(0, 500, 50):
            await asyncio.gather(*(attack(number) for number in range(first, first + 50)))
        after = _series(stack)
        assert len(after) - len(before) <= 5, after - before
        page = generate_latest(stack.registry).decode()
        assert not any(word in page for word in (evil, "Evil", "tenant-", "id1"))


def _series(stack: Stack) -> set[str]:
    lines = generate_latest(stack.registry).decode().splitlines()
    return {line.rpartition(" ")[0] for line in lines if not line.startswith("#")}


async def _unknown_method(stack: Stack, name: str) -> None:
    async with aio.insecure_channel(stack.address) as channel:
        call: Any = channel.unary_unary(f"/pagemill.v1.Inference/{name}")
        with pytest.raises(aio.AioRpcError) as failed:
            await call(b"", timeout=10)
        assert failed.value.code() is grpc.StatusCode.UNIMPLEMENTED


SPAN = "pagemill.v1.Inference/Generate"


async def test_case_I_03_every_sampled_call_has_one_span_however_it_ends(
    bench_t: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with otlp_receiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        async with tracing(os.environ, version="0.0.0", steps_every=1) as traces:
            assert traces is not None
            async with serving(
                bench_t,
                num_blocks=16,
                max_model_len=256,
                preemption_victim="newest",
                traces=traces,
                step_s=0.005,
            ) as stack:
                await _calls(stack)
        _check_spans(receiver)


def _trace(number: int) -> str:
    return f"{number:032x}"


async def _calls(stack: Stack) -> None:
    """Make a call of each kind, 1 to 7; beside 7 one without a parent, then two with bad ones."""

    async def call(number: int, flag: str = "01", **arguments: Any) -> None:
        parent = {"traceparent": f"00-{_trace(number)}-{'b' * 16}-{flag}"} if number else {}
        if flag == "malformed":
            parent = {"traceparent": "00-zz-1"}
        async with AsyncClient(stack.address, metadata=parent) as client:
            given = {"prompt": [1] * 4, "temperature": 0, "max_tokens": 3, **arguments}
            timeout = given.pop("timeout", 60)
            events = client.generate(timeout=timeout, **given)
            async for event in events:
                if arguments.get("leave") and isinstance(event, Delta):
                    break
            await events.aclose()

    await call(1)
    async with AsyncClient(
        stack.address, metadata={"traceparent": f"00-{_trace(2)}-{'b' * 16}-01"}
    ) as client:
        events = client.generate(prompt=[1], temperature=0, max_tokens=50)
        await anext(events)
        await anext(events)
        await events.aclose()
    await stack.idle()
    stack.workers[0].host.step_s = 0.1
    seen = stack.scheduler._next_sequence
    for timeout_s in deadlines(0.05, lambda: stack.scheduler._next_sequence > seen):
        with pytest.raises(DeadlineExceededError):
            await call(3, max_tokens=50, timeout=timeout_s)
    stack.workers[0].host.step_s = 0.005
    with pytest.raises(InvalidArgumentError):
        await call(4, prompt=[-1])
    with pytest.raises(InvalidArgumentError):
        await call(5, prompt=[1] * 100)  # never fits
    # Its worker is gone in the middle, and another takes over.
    outlives = asyncio.create_task(call(6, max_tokens=40))
    await until(lambda: stack.scheduler.num_running == 1)
    await stack.stop_worker()
    await stack.add_worker(step_s=0.005)
    await outlives
    # Two that do not fit together: the newer is preempted.
    older = asyncio.create_task(call(0, prompt=[9] * 4, max_tokens=40))
    await until(lambda: stack.scheduler.num_running == 1)
    await call(7, max_tokens=40)
    await older
    await call(8, flag="malformed")
    await call(9, flag="00")


def _check_spans(receiver: Receiver) -> None:
    spans = receiver.named(SPAN)
    by_trace = {int(span.trace_id.hex(), 16): span for span in spans}
    assert len(by_trace) == len(spans)
    # What came without a parent, and with a malformed one, has a trace of its own.
    assert len(spans) == 9
    assert 9 not in by_trace
    for number in range(1, 8):
        span = by_trace[number]
        assert span.parent_span_id.hex() == "b" * 16
        assert span.end_time_unix_nano > span.start_time_unix_nano
        said = attributes(list(span.attributes))
        assert (span.status.code == Status.STATUS_CODE_ERROR) == (number in {2, 3, 4, 5})
        if number in {1, 6, 7}:
            assert said["gen_ai.response.finish_reasons"] == ["length"]
            assert said["gen_ai.usage.input_tokens"] == 4
            assert said["gen_ai.usage.output_tokens"] == (3 if number == 1 else 40)
        if number in {2, 3}:
            assert said["gen_ai.response.finish_reasons"] == ["abort"]
    roots = [span for span in spans if not span.parent_span_id]
    assert len(roots) == 2
    for number in (6, 7):
        # It did not run for a while: between two parts that ran, none over another.
        parts = receiver.children(by_trace[number])
        assert [event.name for event in by_trace[number].events] == ["preempted"]
        assert "preempted" in [part.name for part in parts]
        for before, after in pairwise(parts):
            assert before.end_time_unix_nano <= after.start_time_unix_nano
