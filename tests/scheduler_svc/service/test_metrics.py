"""Metrics say what happened, grow only, cost no series per client, and are served over HTTP."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import pytest
from grpc import aio
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from fake_door import FakeDoor
from front_end_loopback import EOS, Loopback, front_end, loopback
from grpc_answers import deadlines, eventually
from pagemill.v1.generation_pb2 import Sampling, Stopping
from pagemill.v1.inference_pb2 import CacheOptions, GenerateRequest
from raw_connections import connection
from scheduler_svc.core.free_block_queue import BlockId
from scheduler_svc.core.miss_reason import MissReason
from scheduler_svc.core.residency import Residency
from scheduler_svc.service.metrics import LoadCollector, ResidencyMetrics, StepMetrics, new_registry
from scheduler_svc.service.metrics_http import serve_metrics
from scheduler_svc.service.server_state import CacheState
from step_records import step_record

Values = dict[tuple[str, str], float]


def values(registry: CollectorRegistry) -> Values:
    """Return every sample by name and labels."""
    return {
        (sample.name, ",".join(sample.labels.values())): sample.value
        for family in registry.collect()
        for sample in family.samples
    }


@dataclass(frozen=True, slots=True)
class Measured:
    served: Loopback
    registry: CollectorRegistry

    def value(self, name: str, labels: str = "") -> float:
        return values(self.registry).get((f"pagemill_{name}", labels), 0.0)


@pytest.fixture
async def measured() -> AsyncIterator[Measured]:
    registry = CollectorRegistry()
    async with loopback(front_end(registry=registry)) as served:
        registry.register(LoadCollector(served.door.load))
        yield Measured(served, registry)


async def generate(
    served: Loopback, request: GenerateRequest, timeout: float | None = None
) -> None:
    with contextlib.suppress(aio.AioRpcError):
        async for _ in served.inference.Generate(request, timeout=timeout):
            pass


FIVE = GenerateRequest(text="ab", stopping=Stopping(max_tokens=5))


async def test_a_finished_request_counts_once_in_every_interval(measured: Measured) -> None:
    await generate(measured.served, FIVE)
    await eventually(lambda: measured.value("request_success_total", "length") == 1)
    assert measured.value("time_to_first_token_seconds_count") == 1
    assert measured.value("inter_token_latency_seconds_count") == 4
    parts = 0.0
    for name in ("queue", "prefill", "decode"):
        assert measured.value(f"request_{name}_time_seconds_count") == 1
        parts += measured.value(f"request_{name}_time_seconds_sum")
    assert measured.value("e2e_request_latency_seconds_count") == 1
    assert measured.value("e2e_request_latency_seconds_sum") == pytest.approx(parts, abs=1e-6)


async def test_tokens_of_one_message_count_one_by_one(measured: Measured) -> None:
    measured.served.door.batch_size = 3
    await generate(measured.served, GenerateRequest(text="ab", stopping=Stopping(max_tokens=9)))
    await eventually(lambda: measured.value("inter_token_latency_seconds_count") == 6)
    assert measured.value("time_to_first_token_seconds_count") == 1


async def test_each_sequence_counts_its_end_and_its_own_intervals(measured: Measured) -> None:
    measured.served.door.more_scripts = (lambda _submission: (*b"xy", EOS),)
    request = GenerateRequest(text="ab", sampling=Sampling(n=2), stopping=FIVE.stopping)
    await generate(measured.served, request)
    await eventually(lambda: measured.value("request_success_total", "length") == 1)
    assert measured.value("request_success_total", "stop") == 1
    assert measured.value("time_to_first_token_seconds_count") == 1
    assert measured.value("inter_token_latency_seconds_count") == 4 + 2
    assert measured.value("e2e_request_latency_seconds_count") == 1


async def test_a_cancelled_request_counts_as_aborted(measured: Measured) -> None:
    measured.served.door.step_s = 0.05
    call = measured.served.inference.Generate(GenerateRequest(text="ab"))
    await call.read()
    call.cancel()
    await eventually(lambda: measured.value("request_success_total", "abort") == 1)
    # It ended before its first token.
    assert measured.value("time_to_first_token_seconds_count") == 0
    assert measured.value("request_decode_time_seconds_count") == 0

    # The next ends behind its first token.
    first_tokens = "time_to_first_token_seconds_count"
    for timeout_s in deadlines(0.2, lambda: measured.value(first_tokens) == 1):
        await generate(measured.served, GenerateRequest(text="ab"), timeout=timeout_s)
    await eventually(lambda: measured.value("request_success_total", "abort") >= 2)
    assert measured.value(first_tokens) == 1


async def test_a_refused_request_counts_by_status_alone(measured: Measured) -> None:
    await generate(measured.served, GenerateRequest())
    await generate(measured.served, GenerateRequest(model="x", text="x"))
    assert measured.value("request_refusals_total", "INVALID_ARGUMENT") == 1
    assert measured.value("request_refusals_total", "NOT_FOUND") == 1
    assert measured.value("e2e_request_latency_seconds_count") == 0


async def test_no_text_of_a_client_becomes_a_label(measured: Measured) -> None:
    await generate(measured.served, FIVE)
    await generate(measured.served, GenerateRequest(model="warm-up", text="x"))
    before = len(values(measured.registry))
    for number in range(100):
        secret = f"s3cret-{number}"
        for request in (
            GenerateRequest(model=secret, text="x"),
            GenerateRequest(
                request_id=secret,
                text=secret,
                priority=number,
                cache=CacheOptions(salt=secret),
                stopping=Stopping(max_tokens=2, stop=[secret]),
            ),
        ):
            await generate(measured.served, request)
    assert len(values(measured.registry)) <= before + 5
    assert not any("s3cret" in label for _, label in values(measured.registry))


async def test_totals_never_fall(measured: Measured) -> None:
    def totals() -> Values:
        return {
            key: value
            for key, value in values(measured.registry).items()
            if key[0].endswith(("_total", "_count", "_sum", "_bucket"))
        }

    before = totals()
    for request in (FIVE, GenerateRequest(), FIVE):
        await generate(measured.served, request)
        after = totals()
        assert all(after[key] >= value for key, value in before.items())
        before = after


async def test_the_engines_state_is_read_at_each_scrape(measured: Measured) -> None:
    for name, labels, value in (
        ("requests_running", "", 0),
        ("requests_waiting", "", 1),
        ("blocks", "used", 3),
        ("blocks", "idle_cached", 2),
        ("blocks", "free", 5),
        ("prompt_tokens_total", "", 11),
        ("generation_tokens_total", "", 22),
        ("prefix_cache_queries_total", "", 33),
        ("prefix_cache_hits_total", "", 12),
        ("preemptions_total", "", 4),
        ("recomputed_tokens_total", "", 5),
    ):
        assert measured.value(name, labels) == value
    measured.served.door.step_s = 0.01
    stream = aiter(measured.served.inference.Generate(GenerateRequest(text="ab")))
    await anext(stream)
    assert measured.value("requests_running") == 1


def test_a_steps_time_is_split_into_its_phases() -> None:
    registry = CollectorRegistry()
    metrics = StepMetrics(registry)
    for _ in range(2):
        metrics.step(step_record())
    seen = values(registry)
    assert seen["pagemill_step_seconds_count", ""] == 2
    phases = {
        "schedule": 0.001,
        "encode": 0.003,
        "wire": 0.004,
        "worker_wait": 0.003,
        "execute": 0.01,
        "emit": 0.005,
    }
    for phase, seconds in phases.items():
        assert seen["pagemill_step_phase_seconds_sum", phase] == pytest.approx(2 * seconds)
    # Nothing of a step is counted twice or forgotten.
    assert seen["pagemill_step_seconds_sum", ""] == pytest.approx(2 * sum(phases.values()))


def test_the_tokens_that_were_missed_are_told_by_reason() -> None:
    load = FakeDoor(64).load()
    cache = CacheState(0.25, {MissReason.EVICTED: 30, MissReason.TAIL: 4}, 6, 7)
    registry = CollectorRegistry()
    registry.register(LoadCollector(lambda: replace(load, cache=cache)))
    seen = values(registry)
    assert seen["pagemill_prefix_cache_misses_total", "evicted"] == 30
    assert seen["pagemill_prefix_cache_misses_total", "tail"] == 4
    assert seen["pagemill_prefix_cache_hit_rate", ""] == 0.25
    assert seen["pagemill_pinned_blocks", ""] == 6
    assert seen["pagemill_pins_broken_total", ""] == 7


def test_a_blocks_life_is_noted_once_when_it_has_ended() -> None:
    registry = CollectorRegistry()
    residency = Residency(1, lambda: 0.0)
    metrics = ResidencyMetrics(registry, residency)
    block = BlockId(1)
    residency.allocated([block], 10**9)
    residency.hit([block], 2 * 10**9)
    residency.hit([block], 3 * 10**9)
    metrics.collect_lives()
    assert values(registry)["pagemill_kv_block_lifetime_seconds_count", ""] == 0
    residency.allocated([block], 4 * 10**9)
    for _ in range(2):
        metrics.collect_lives()
    seen = values(registry)
    for name, seconds in (("lifetime", 3), ("idle_before_evict", 1), ("reuse_gap", 1)):
        assert seen[f"pagemill_kv_block_{name}_seconds_count", ""] == 1
        assert seen[f"pagemill_kv_block_{name}_seconds_sum", ""] == seconds


@pytest.fixture
async def port() -> AsyncIterator[int]:
    registry = new_registry()
    registry.register(LoadCollector(FakeDoor(64).load))
    async with serve_metrics("127.0.0.1:0", registry) as port:
        yield port


async def answer(port: int, request: bytes) -> tuple[bytes, bytes]:
    """Send bytes and return head and content of what comes back until the server hangs up."""
    async with connection(port) as (reader, writer):
        writer.write(request)
        await writer.drain()
        async with asyncio.timeout(10):
            head, _, content = (await reader.read(-1)).partition(b"\r\n\r\n")
    return head, content


async def test_scrapers_get_text_that_prometheus_reads(port: int) -> None:
    head, content = await answer(port, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert f"Content-Length: {len(content)}".encode() in head
    names = {family.name for family in text_string_to_metric_families(content.decode())}
    assert {"pagemill_blocks", "pagemill_prompt_tokens", "process_cpu_seconds"} <= names


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /healthz HTTP/1.1\r\n\r\n", b"200 OK"),
        (b"HEAD /metrics?x=1 HTTP/1.1\r\n\r\n", b"200 OK"),
        (b"GET /../etc/passwd HTTP/1.1\r\n\r\n", b"404 Not Found"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"405 Method Not Allowed"),
        (b"\x16\x03\x01\r\n\r\n", b"405 Method Not Allowed"),
    ],
)
async def test_other_requests_are_answered_in_kind(
    port: int, request_: bytes, status: bytes
) -> None:
    head, _ = await answer(port, request_)
    assert head.startswith(b"HTTP/1.1 " + status)


async def test_a_request_without_end_gets_no_answer(port: int) -> None:
    assert await answer(port, b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 100_000) == (b"", b"")
    _, content = await answer(port, b"GET /healthz HTTP/1.1\r\n\r\n")
    assert content == b"ok\n"


async def test_those_who_hold_their_connections_are_few(port: int) -> None:
    async with contextlib.AsyncExitStack() as stack:
        idle = [await stack.enter_async_context(connection(port)) for _ in range(16)]
        assert await answer(port, b"") == (b"", b"")
        # It was refused while the others were still waited for, not after their time was up.
        assert not any(reader.at_eof() for reader, _ in idle)


async def test_those_who_hold_their_connections_do_so_not_for_long(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler_svc.service.metrics_http._TIMEOUT_S", 0.1)
    async with contextlib.AsyncExitStack() as stack:
        idle = [await stack.enter_async_context(connection(port)) for _ in range(16)]
        async with asyncio.timeout(10):
            for reader, _ in idle:
                assert await reader.read() == b""
        assert (await answer(port, b"GET /healthz HTTP/1.1\r\n\r\n"))[1] == b"ok\n"


async def test_idle_connections_do_not_disturb_the_end() -> None:
    complaints: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    async with contextlib.AsyncExitStack() as stack:
        async with serve_metrics("127.0.0.1:0", new_registry()) as port:
            reader, _ = await stack.enter_async_context(connection(port))
            await answer(port, b"GET /healthz HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(10):
                assert await reader.read(-1) == b""
    assert complaints == []
