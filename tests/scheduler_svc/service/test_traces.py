"""Spans of requests and steps reach a real collector, say what happened, and cost little."""

import asyncio
import os
import time
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import pytest
from grpc import aio
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from front_end_loopback import EOS, Loopback, front_end, loopback
from grpc_answers import deadlines
from otlp_receiver import Receiver, attributes, otlp_receiver
from pagemill.v1.generation_pb2 import Sampling, Stopping
from pagemill.v1.inference_pb2 import GenerateRequest
from scheduler_svc.core.errors import NeverFitsError, RequestError, UnavailableError
from scheduler_svc.core.request import RequestKey
from scheduler_svc.service.engine_door import Account
from scheduler_svc.service.request_trace import request_parts
from scheduler_svc.service.tracing import Tracing, tracing
from step_records import MS, step_record

TRACE_ID, CALLER_ID = "a" * 32, "b" * 16
SAMPLED = (("traceparent", f"00-{TRACE_ID}-{CALLER_ID}-01"),)
NOT_SAMPLED = (("traceparent", f"00-{TRACE_ID}-{CALLER_ID}-00"),)
FIVE = GenerateRequest(request_id="r1", text="ab", stopping=Stopping(max_tokens=5))


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with otlp_receiver() as receiver:
        yield receiver


@pytest.fixture
async def traces(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Tracing]:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
    async with tracing(os.environ, version="1.2.3", steps_every=4) as traces:
        assert traces is not None
        yield traces


@pytest.fixture
async def served(traces: Tracing) -> AsyncIterator[Loopback]:
    async with loopback(front_end(tracer=traces.requests)) as served:
        yield served


async def generate(
    served: Loopback,
    request: GenerateRequest,
    metadata: tuple[tuple[str, str], ...] = SAMPLED,
    timeout: float | None = None,
) -> None:
    with suppress(aio.AioRpcError):
        async for _ in served.inference.Generate(request, metadata=metadata, timeout=timeout):
            pass


async def span_of(receiver: Receiver, traces: Tracing) -> Span:
    """Return the one request span, once it has been exported."""
    async with asyncio.timeout(5):
        while not receiver.named("pagemill.v1.Inference/Generate"):
            await asyncio.sleep(0.01)
            await traces.flush()
    (span,) = receiver.named("pagemill.v1.Inference/Generate")
    return span


def assert_parts_fill(whole: Span, parts: list[Span]) -> None:
    """Check that the parts follow each other, from the begin of the whole to its end."""
    begin = whole.start_time_unix_nano
    for part in parts:
        assert part.start_time_unix_nano == begin
        assert part.end_time_unix_nano > begin
        assert part.trace_id == whole.trace_id
        begin = part.end_time_unix_nano
    assert begin <= whole.end_time_unix_nano


async def test_a_request_is_a_span_below_its_callers_with_its_parts(
    receiver: Receiver, traces: Tracing, served: Loopback
) -> None:
    served.door.num_cached_tokens = 1
    request = GenerateRequest(
        request_id="r1", text="ab", sampling=Sampling(seed=2**64 - 1, temperature=0.5)
    )
    request.stopping.max_tokens = 5
    began_ns = time.time_ns()
    await generate(served, request)
    span = await span_of(receiver, traces)
    assert span.kind == Span.SPAN_KIND_SERVER
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE_ID, CALLER_ID)
    assert began_ns <= span.start_time_unix_nano <= span.end_time_unix_nano <= time.time_ns()
    assert span.status.code == Status.STATUS_CODE_UNSET
    said = attributes(list(span.attributes))
    assert (
        said.items()
        >= {
            "rpc.system.name": "grpc",
            "rpc.method": "pagemill.v1.Inference/Generate",
            "rpc.response.status_code": "OK",
            "gen_ai.operation.name": "text_completion",
            "pagemill.cache.miss_reason": "tail",
            "gen_ai.provider.name": "pagemill",
            "gen_ai.request.model": "toy",
            "gen_ai.request.max_tokens": 5,
            "gen_ai.request.temperature": 0.5,
            "gen_ai.request.seed": str(2**64 - 1),
            "gen_ai.response.id": "r1",
            "gen_ai.usage.input_tokens": 2,
            "gen_ai.usage.output_tokens": 5,
            "gen_ai.usage.cache_read.input_tokens": 1,
            "gen_ai.response.finish_reasons": ["length"],
        }.items()
    )
    parts = receiver.children(span)
    assert [part.name for part in parts] == ["queue", "prefill", "decode"]
    assert_parts_fill(span, parts)
    assert not traces.requests.live
    assert (
        receiver.resources[0].items()
        >= {
            "service.name": "pagemill-scheduler",
            "service.version": "1.2.3",
        }.items()
    )


async def test_a_preempted_request_shows_when_it_did_not_run(
    receiver: Receiver, traces: Tracing, served: Loopback
) -> None:
    served.door.step_s = 0.02
    stream = aiter(served.inference.Generate(FIVE, metadata=SAMPLED))
    for _ in range(3):
        await anext(stream)
    served.door.preemption_times_ns = [time.monotonic_ns()]
    async for _ in stream:
        pass
    span = await span_of(receiver, traces)
    parts = receiver.children(span)
    assert [part.name for part in parts] == ["queue", "prefill", "decode", "preempted", "decode"]
    assert_parts_fill(span, parts)
    (event,) = span.events
    assert (event.name, event.time_unix_nano) == ("preempted", parts[3].start_time_unix_nano)


async def test_a_span_has_the_end_of_each_sequence_and_the_tokens_of_all(
    receiver: Receiver, traces: Tracing, served: Loopback
) -> None:
    served.door.more_scripts = (lambda _submission: (*b"xy", EOS),)
    request = GenerateRequest(text="ab", sampling=Sampling(n=2), stopping=FIVE.stopping)
    await generate(served, request)
    said = attributes(list((await span_of(receiver, traces)).attributes))
    assert said["gen_ai.request.choice.count"] == 2
    assert said["gen_ai.response.finish_reasons"] == ["length", "stop"]
    assert said["gen_ai.usage.output_tokens"] == 5 + 3


@pytest.mark.parametrize(
    ("request_", "refusal", "code", "words"),
    [
        (GenerateRequest(), None, "INVALID_ARGUMENT", "prompt is missing"),
        (FIVE, NeverFitsError("prompt", "too big"), "INVALID_ARGUMENT", "too big"),
        (FIVE, UnavailableError("no worker"), "UNAVAILABLE", "no worker"),
    ],
)
async def test_a_refused_request_is_a_span_with_the_reason(
    receiver: Receiver,
    traces: Tracing,
    served: Loopback,
    request_: GenerateRequest,
    refusal: RequestError | None,
    code: str,
    words: str,
) -> None:
    served.door.refuse = refusal
    await generate(served, request_)
    span = await span_of(receiver, traces)
    assert span.status.code == Status.STATUS_CODE_ERROR
    assert words in span.status.message
    said = attributes(list(span.attributes))
    assert (said["rpc.response.status_code"], said["error.type"]) == (code, code)
    assert span.trace_id.hex() == TRACE_ID
    assert not receiver.children(span)


async def test_a_request_that_loses_its_worker_is_a_span_with_its_tokens(
    receiver: Receiver, traces: Tracing, served: Loopback
) -> None:
    stream = aiter(served.inference.Generate(FIVE, metadata=SAMPLED))
    served.door.step_s = 0.01
    for _ in range(3):
        await anext(stream)
    served.door.error = UnavailableError("no worker")
    with suppress(aio.AioRpcError):
        async for _ in stream:
            pass
    span = await span_of(receiver, traces)
    said = attributes(list(span.attributes))
    assert said["rpc.response.status_code"] == "UNAVAILABLE"
    assert said["gen_ai.response.finish_reasons"] == ["error"]
    assert said["gen_ai.usage.output_tokens"] == 2


async def test_cancelled_and_expired_requests_are_spans(
    receiver: Receiver, traces: Tracing, served: Loopback
) -> None:
    served.door.step_s = 0.01
    call = served.inference.Generate(FIVE, metadata=SAMPLED)
    await call.read()
    call.cancel()
    span = await span_of(receiver, traces)
    said = attributes(list(span.attributes))
    assert (span.status.code, said["error.type"]) == (Status.STATUS_CODE_ERROR, "CANCELLED")
    assert said["gen_ai.response.finish_reasons"] == ["abort"]

    receiver.spans.clear()
    served.door.step_s = 1.0
    for timeout_s in deadlines(0.1, lambda: len(served.door.submissions) > 1):
        await generate(served, FIVE, timeout=timeout_s)
    said = attributes(list((await span_of(receiver, traces)).attributes))
    assert said["error.type"] == "DEADLINE_EXCEEDED"


@pytest.mark.parametrize("malformed", ["", "x", "00-zz-yy-01", f"00-{'0' * 32}-{CALLER_ID}-01"])
async def test_without_a_readable_parent_a_request_is_its_own_root(
    receiver: Receiver, traces: Tracing, served: Loopback, malformed: str
) -> None:
    await generate(served, FIVE, (("traceparent", malformed),))
    span = await span_of(receiver, traces)
    assert span.parent_span_id == b""
    assert span.trace_id.hex() not in {TRACE_ID, "0" * 32}


async def test_what_the_caller_does_not_sample_is_not_traced(
    receiver: Receiver, traces: Tracing, served: Loopback
) -> None:
    await generate(served, FIVE, NOT_SAMPLED)
    assert not traces.requests.live
    assert served.door.submissions[0].traceparent == ""
    await generate(served, FIVE)
    assert served.door.submissions[1].traceparent.startswith(f"00-{TRACE_ID}-")
    span = await span_of(receiver, traces)
    assert served.door.submissions[1].traceparent == f"00-{TRACE_ID}-{span.span_id.hex()}-01"


@st.composite
def accounts(draw: st.DrawFn) -> Account:
    """Return an account whose times are in order, of a request that got more or less far."""
    times = draw(st.lists(st.integers(0, 50), min_size=3, max_size=8).map(sorted))
    arrival, *rest = times
    scheduled = rest.pop(0) if draw(st.booleans()) else None
    first_token = draw(st.sampled_from(rest)) if scheduled is not None else None
    return Account(
        num_prompt_tokens=1,
        num_output_tokens=1,
        num_cached_tokens=0,
        num_recomputed_tokens=0,
        num_preemptions=0,
        arrival_ns=arrival,
        first_scheduled_ns=scheduled,
        first_token_ns=first_token,
        finished_ns=times[-1],
        first_step_id=None,
        last_step_id=None,
        preemption_times_ns=tuple(draw(st.lists(st.sampled_from(rest)))) if scheduled else (),
    )


@given(account=accounts(), token_times=st.lists(st.integers(0, 50)).map(sorted))
def test_the_parts_of_a_request_are_its_whole_time(
    account: Account, token_times: list[int]
) -> None:
    end_ns = account.finished_ns or 0
    token_times = [time for time in token_times if account.arrival_ns <= time <= end_ns]
    position = account.arrival_ns
    before = ""
    for name, begin_ns, part_end_ns in request_parts(account, array("q", token_times), end_ns):
        assert begin_ns == position < part_end_ns
        assert name != before
        position, before = part_end_ns, name
    assert position == end_ns


OF_A_TENANT = GenerateRequest(
    request_id="r1", tenant="a", text="ab", stopping=Stopping(max_tokens=5)
)


async def test_a_chosen_step_is_a_trace_of_its_own_linked_with_its_requests(
    receiver: Receiver, traces: Tracing, served: Loopback
) -> None:
    served.door.step_s = 0.02
    stream = aiter(served.inference.Generate(OF_A_TENANT, metadata=SAMPLED))
    await anext(stream)
    assert [bool(traces.steps.traceparent(step_id)) for step_id in range(6)] == [
        *(True, False, False, False),
        *(True, False),
    ]
    traceparent = traces.steps.traceparent(8)
    keys = RequestKey("a", "r1"), RequestKey("", "r1"), RequestKey("a", "not traced")
    record = step_record(8, request_keys=keys, traceparent=traceparent)
    traces.steps.step(record)
    async for _ in stream:
        pass
    request = await span_of(receiver, traces)
    (step,) = receiver.named("step")
    _, trace_id, span_id, _ = traceparent.split("-")
    assert (step.trace_id.hex(), step.span_id.hex(), step.parent_span_id) == (
        *(trace_id, span_id),
        b"",
    )
    assert [(link.trace_id, link.span_id) for link in step.links] == [
        (request.trace_id, request.span_id)
    ]
    assert [(link.trace_id, link.span_id) for link in request.links] == [
        (step.trace_id, step.span_id)
    ]
    assert attributes(list(request.attributes))["pagemill.tenant"] == "a"
    said = attributes(list(step.attributes))
    assert said["pagemill.step.id"] == 8
    assert said["pagemill.step.traced_for"] == "sample"

    parts = receiver.children(step)
    assert_parts_fill(step, parts)
    assert [(part.name, duration_ms(part)) for part in parts] == [
        ("schedule", 1),
        ("encode", 2),
        ("wire", 2),
        ("worker_wait", 3),
        ("execute", 10),
        ("wire", 2),
        ("decode", 1),
        ("emit", 5),
    ]
    (execute,) = receiver.named("execute")
    inside = receiver.children(execute)
    assert_parts_fill(execute, inside)
    assert [(part.name, duration_ms(part)) for part in inside] == [
        ("prepare", 1),
        ("forward", 7),
        ("sample", 2),
    ]


def duration_ms(span: Span) -> float:
    return (span.end_time_unix_nano - span.start_time_unix_nano) / MS


async def test_slow_and_preempting_steps_are_traced_unasked_but_not_in_crowds(
    receiver: Receiver, traces: Tracing
) -> None:
    begin_ns = time.monotonic_ns()

    def steps(first: int, count: int, change: Callable[[int], int]) -> None:
        for step_id in range(first, first + count):
            traces.steps.step(
                step_record(
                    step_id, begin_ns=begin_ns + step_id * 20 * MS, execute_ms=change(step_id)
                )
            )

    steps(1, 64, lambda _step_id: 10)
    steps(65, 10, lambda step_id: 200 if step_id in {70, 71} else 10)
    traces.steps.step(step_record(100, begin_ns=begin_ns + 100 * 20 * MS, num_preempted=1))
    await traces.flush()
    traced = [attributes(list(span.attributes)) for span in receiver.named("step")]
    assert [(said["pagemill.step.id"], said["pagemill.step.traced_for"]) for said in traced] == [
        (70, "slow"),
        (100, "preemption"),
    ]
