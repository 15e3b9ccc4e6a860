"""Prometheus metrics of the engine and of requests, on a registry of our own.

No label holds what a client sent. States and totals are read from the engine when someone
scrapes; only durations are noted as they happen.
"""

from collections.abc import Callable, Iterable, Sequence

import grpc
from prometheus_client import (
    CollectorRegistry,
    Counter,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from scheduler_svc.core.request import FinishReason
from scheduler_svc.core.residency import Residency
from scheduler_svc.service.engine_door import Account
from scheduler_svc.service.server_state import Load
from scheduler_svc.service.step_record import StepRecord

_STEP_BUCKETS = (
    *(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05),
    *(0.1, 0.2, 0.5, 1.0, 2.0, 5.0),
)
# vLLM's buckets, so that service levels of its users stay edges of a bucket.
_FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_INTER_TOKEN_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_RESIDENCY_BUCKETS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0),
    *(20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0),
)
_REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


def new_registry() -> CollectorRegistry:
    """Return a registry that knows this process: memory, CPU time, file descriptors."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


class StepMetrics:
    """Where steps spend their time: an observer of the engine.

    Cost: 10 us a step.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._step = Histogram(
            "pagemill_step_seconds",
            "From planning a step to handing out its tokens.",
            buckets=_STEP_BUCKETS,
            registry=registry,
        )
        phases = Histogram(
            "pagemill_step_phase_seconds",
            "Parts of a step: schedule, encode, wire, worker_wait, execute, emit.",
            labelnames=["phase"],
            buckets=_STEP_BUCKETS,
            registry=registry,
        )
        self._schedule = phases.labels("schedule")
        self._encode = phases.labels("encode")
        self._wire = phases.labels("wire")
        self._worker_wait = phases.labels("worker_wait")
        self._execute = phases.labels("execute")
        self._emit = phases.labels("emit")

    def step(self, record: StepRecord) -> None:
        """Note one step."""
        self._step.observe(1e-9 * (record.emitted_ns - record.schedule_begin_ns))
        self._schedule.observe(1e-9 * (record.schedule_end_ns - record.schedule_begin_ns))
        encode_ns = record.encoded_ns - record.schedule_end_ns
        decode_ns = record.decoded_ns - record.result_received_ns
        self._encode.observe(1e-9 * (encode_ns + decode_ns))
        self._wire.observe(1e-9 * record.wire_ns)
        self._worker_wait.observe(1e-9 * record.wait_ns)
        self._execute.observe(1e-9 * record.execute_ns)
        self._emit.observe(1e-9 * (record.emitted_ns - record.decoded_ns))


class RequestMetrics:
    """How requests fare, as their clients see it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, meaning: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"pagemill_{name}", meaning, buckets=buckets, registry=registry)

        self._first_token = histogram(
            "time_to_first_token_seconds",
            "From arrival to the first token.",
            _FIRST_TOKEN_BUCKETS,
        )
        self._inter_token = histogram(
            "inter_token_latency_seconds",
            "Between two tokens of a sequence; of several in one message, their mean.",
            _INTER_TOKEN_BUCKETS,
        )
        self._whole = histogram(
            "e2e_request_latency_seconds", "From arrival to the end.", _REQUEST_BUCKETS
        )
        self._queue = histogram(
            "request_queue_time_seconds", "From arrival to the first step.", _REQUEST_BUCKETS
        )
        self._prefill = histogram(
            "request_prefill_time_seconds",
            "From the first step to the first token.",
            _REQUEST_BUCKETS,
        )
        self._decode = histogram(
            "request_decode_time_seconds", "From the first token to the end.", _REQUEST_BUCKETS
        )
        ended = Counter(
            "pagemill_request_success",
            "Sequences of accepted requests that have ended, by how; cancelled ones as abort.",
            labelnames=["finished_reason"],
            registry=registry,
        )
        self._ended = {reason: ended.labels(reason.value) for reason in FinishReason}
        self._refused = Counter(
            "pagemill_request_refusals",
            "Requests that were never accepted, by gRPC status.",
            labelnames=["code"],
            registry=registry,
        )

    def first_token(self, since_arrival_s: float) -> None:
        """Note that a request has delivered a token."""
        self._first_token.observe(since_arrival_s)

    def later_tokens(self, count: int, since_last_s: float) -> None:
        """Note further tokens of a sequence, and the time since the one before them."""
        each = since_last_s / count
        for _ in range(count):
            self._inter_token.observe(each)

    def ended(self, reasons: Sequence[FinishReason], account: Account, ended_ns: int) -> None:
        """Note the end of a request that had been accepted, with the reason of each sequence.

        It ended at `ended_ns` if the account does not say when.
        """
        end_ns = account.finished_ns or ended_ns
        for reason in reasons:
            self._ended[reason].inc()
        self._whole.observe(1e-9 * (end_ns - account.arrival_ns))
        if account.first_scheduled_ns is None:
            return
        self._queue.observe(1e-9 * (account.first_scheduled_ns - account.arrival_ns))
        if account.first_token_ns is None:
            return
        self._prefill.observe(1e-9 * (account.first_token_ns - account.first_scheduled_ns))
        self._decode.observe(1e-9 * (end_ns - account.first_token_ns))

    def refused(self, code: grpc.StatusCode) -> None:
        """Note a request that never reached the queue."""
        self._refused.labels(code.name).inc()


class ResidencyMetrics:
    """How long a sample of the blocks lives, and how it is reused."""

    def __init__(self, registry: CollectorRegistry, residency: Residency) -> None:
        def histogram(name: str, meaning: str) -> Histogram:
            return Histogram(
                f"pagemill_kv_block_{name}_seconds",
                meaning,
                buckets=_RESIDENCY_BUCKETS,
                registry=registry,
            )

        self._residency = residency
        self._lifetime = histogram(
            "lifetime", "From a block's allocation to the next; with --kv-cache-metrics."
        )
        self._idle = histogram(
            "idle_before_evict",
            "From a block's latest hit to its next allocation; with --kv-cache-metrics.",
        )
        self._gap = histogram(
            "reuse_gap", "Between the latest four hits of a block; with --kv-cache-metrics."
        )

    def collect_lives(self) -> None:
        """Note the lives that have ended since the last call."""
        for life in self._residency.take():
            self._lifetime.observe(1e-9 * life.lifetime_ns)
            self._idle.observe(1e-9 * life.idle_ns)
            for gap_ns in life.reuse_gaps_ns:
                self._gap.observe(1e-9 * gap_ns)


class LoadCollector(Collector):
    """The engine's state and totals at the time of a scrape."""

    def __init__(self, load: Callable[[], Load]) -> None:
        """Read `load` at each scrape; that must happen on the engine's event loop."""
        self._load = load

    def collect(self) -> Iterable[Metric]:
        """Yield what the engine says now."""
        load = self._load()
        yield GaugeMetricFamily(
            "pagemill_requests_running", "Requests that hold blocks.", load.running
        )
        yield GaugeMetricFamily("pagemill_requests_waiting", "Requests in the queue.", load.waiting)
        blocks = GaugeMetricFamily(
            "pagemill_blocks",
            "Usable blocks: used by requests, idle with content that can be hit, or free.",
            labels=["state"],
        )
        blocks.add_metric(["used"], load.used_blocks)
        blocks.add_metric(["idle_cached"], load.idle_cached_blocks)
        blocks.add_metric(["free"], load.free_blocks)
        yield blocks
        yield GaugeMetricFamily(
            "pagemill_pinned_blocks",
            "Blocks that a pin keeps, used or idle.",
            load.cache.pinned_blocks,
        )
        yield GaugeMetricFamily(
            "pagemill_adapters", "Adapters that requests can name.", load.adapters
        )
        yield CounterMetricFamily(
            "pagemill_pins_broken", "Pins broken to go on at all.", load.cache.broken_pins
        )
        yield GaugeMetricFamily(
            "pagemill_prefix_cache_hit_rate",
            "Share of tokens found in the cache, over the latest 1,000 requests.",
            load.cache.hit_rate,
        )
        misses = CounterMetricFamily(
            "pagemill_prefix_cache_misses",
            "Tokens looked up and not found, by what ended the hit.",
            labels=["reason"],
        )
        for reason, tokens in load.cache.missed_tokens.items():
            misses.add_metric([reason.value], tokens)
        yield misses
        totals = load.totals
        for name, meaning, value in (
            ("steps", "Steps run.", totals.steps),
            ("prompt_tokens", "Prompt tokens of admitted requests.", totals.prompt_tokens),
            ("generation_tokens", "Tokens generated.", totals.generation_tokens),
            ("prefix_cache_queries", "Tokens looked up in the cache.", totals.prefix_queries),
            ("prefix_cache_hits", "Tokens found in the cache.", totals.prefix_hits),
            ("preemptions", "Times a request lost its blocks.", totals.preemptions),
            ("recomputed_tokens", "Tokens computed again.", totals.recomputed_tokens),
            ("draft_tokens", "Tokens drafted and verified.", totals.draft_tokens),
            (
                "accepted_draft_tokens",
                "Drafted tokens that the model said.",
                totals.accepted_draft_tokens,
            ),
        ):
            yield CounterMetricFamily(f"pagemill_{name}", meaning, value)
