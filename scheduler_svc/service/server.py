"""The life of the service: build, listen, serve, drain, stop."""

import asyncio
import gc
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import structlog
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry

from scheduler_svc.config import SchedulerSettings
from scheduler_svc.core.block_hash import HashAlgorithm
from scheduler_svc.core.errors import UnavailableError
from scheduler_svc.core.eviction import EVICTION_POLICIES
from scheduler_svc.core.hash_algorithms import HASH_ALGORITHMS
from scheduler_svc.core.kv_events import KvEventLog
from scheduler_svc.core.kv_memory import KvMemory
from scheduler_svc.core.limits import Limits
from scheduler_svc.core.residency import Residency
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.victims import VICTIM_POLICIES
from scheduler_svc.core.waiting_queue import waiting_queue
from scheduler_svc.errors import ConfigError
from scheduler_svc.service.adapter_desk import AdapterDesk
from scheduler_svc.service.engine import Engine
from scheduler_svc.service.front_end import FrontEnd
from scheduler_svc.service.group_events import Mailbox
from scheduler_svc.service.health import HEALTH_SERVICE, Health
from scheduler_svc.service.kv_event_feed import KvEventFeed
from scheduler_svc.service.kv_watch import KvWatch
from scheduler_svc.service.listener import Listener
from scheduler_svc.service.metrics import (
    LoadCollector,
    RequestMetrics,
    ResidencyMetrics,
    StepMetrics,
    new_registry,
)
from scheduler_svc.service.metrics_http import serve_metrics
from scheduler_svc.service.public_services import PUBLIC_SERVICES, add_public_services
from scheduler_svc.service.signals import two_stage_signals
from scheduler_svc.service.text.model_facts import ModelFacts
from scheduler_svc.service.text.served_architectures import blaming_the_architecture
from scheduler_svc.service.text.tokenizer import Tokenizer
from scheduler_svc.service.tracing import Tracing, tracing
from scheduler_svc.service.worker_group import PROTOCOL_VERSION, JoinTerms, WorkerGroup
from scheduler_svc.service.worker_servicer import add_worker_servicer

STOP_WORKERS_S = 5.0
"""Seconds that workers get to leave when the server stops."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """What serves, without its listeners."""

    group: WorkerGroup
    engine: Engine
    front: FrontEnd

    feed: KvEventFeed | None
    """None: KV events are off."""


async def run_server(
    settings: SchedulerSettings, environ: Mapping[str, str], announce: Callable[[str], None]
) -> None:
    """Serve until the first signal, then drain and stop the workers.

    `announce` gets the lines that a parent process waits for. The environment is read for
    OpenTelemetry's variables only.

    Raises: ConfigError, before anything listens; CancelledError after the second signal;
        ExceptionGroup if a part failed.
    """
    with two_stage_signals() as stop:
        async with AsyncExitStack() as stack:
            public = Listener.bind("listen", settings.listen)
            workers = Listener.bind("worker_listen", settings.worker_listen, ping_peers=True)
            registry = new_registry()
            page = None
            if settings.metrics_listen is not None:
                page = await stack.enter_async_context(
                    _metrics_page(settings.metrics_listen, registry)
                )
            release = version("pagemill")
            traces = await stack.enter_async_context(
                tracing(environ, version=release, steps_every=settings.trace_steps_every)
            )
            with blaming_the_architecture(Path(settings.model_path)):
                parts = _build(settings, release, registry, traces)
            registry.register(LoadCollector(parts.engine.load))
            _log_start(settings, parts.front, page)
            # What has been built lives as long as the process: never look at it again.
            gc.collect()
            gc.freeze()
            await _serve(parts, public, workers, settings.drain_timeout, stop, announce)


async def _serve(
    parts: _Parts,
    public: Listener,
    workers: Listener,
    drain_timeout_s: float,
    stop: asyncio.Event,
    announce: Callable[[str], None],
) -> None:
    health = Health(public.server, PUBLIC_SERVICES)
    add_public_services(public.server, parts.engine, parts.front, parts.feed)
    reflection.enable_server_reflection(
        (*PUBLIC_SERVICES, HEALTH_SERVICE, reflection.SERVICE_NAME), public.server
    )
    add_worker_servicer(workers.server, parts.group)
    async with asyncio.TaskGroup() as tasks:
        background = (
            tasks.create_task(parts.engine.run()),
            tasks.create_task(health.follow(parts.engine.serving)),
        )
        # Left in turn: clients first, then workers, then the loop between them.
        async with workers.serving(), _workers_to_stop(parts.group), public.serving():
            announce(f"listening {public.address}")
            announce(f"workers {workers.address}")
            await stop.wait()
            await _drain(parts.engine, drain_timeout_s)
        for task in background:
            task.cancel()


@asynccontextmanager
async def _workers_to_stop(group: WorkerGroup) -> AsyncIterator[None]:
    """Ask the workers to exit when the block is left in good order."""
    yield
    try:
        async with asyncio.timeout(STOP_WORKERS_S):
            await group.stop()
    except TimeoutError:
        structlog.get_logger("server").warning("workers did not leave", after_s=STOP_WORKERS_S)


@asynccontextmanager
async def _metrics_page(address: str, registry: CollectorRegistry) -> AsyncIterator[str]:
    """Serve metrics while the block lasts, and yield the address with the port taken."""
    async with AsyncExitStack() as stack:
        try:
            port = await stack.enter_async_context(serve_metrics(address, registry))
        except OSError as error:
            raise ConfigError(
                f"metrics_listen is {address}, which cannot be had: {error}"
            ) from error
        yield f"{address.rpartition(':')[0]}:{port}"


async def _drain(engine: Engine, limit_s: float) -> None:
    """Let requests end, up to a limit; the rest keep what they have and get UNAVAILABLE."""
    log = structlog.get_logger("server")
    log.info("draining", limit_s=limit_s, requests=engine.num_live)
    try:
        async with asyncio.timeout(limit_s):
            await engine.drain(for_good=True)
    except TimeoutError:
        log.warning("drain limit reached", requests=engine.num_live)
        engine.fail_all(UnavailableError(f"the server stops; {limit_s:g} s to end have passed"))


def _build(
    settings: SchedulerSettings,
    release: str,
    registry: CollectorRegistry,
    traces: Tracing | None,
) -> _Parts:
    """Read the model's files and put the parts together.

    Raises: ConfigError.
    """
    facts = ModelFacts.from_path(Path(settings.model_path))
    limits = _limits(settings, facts)
    incarnation = secrets.randbits(64)
    mailbox = Mailbox()
    algorithm = HASH_ALGORITHMS[settings.prefix_caching_hash_algo]
    memory = _memory(settings)
    residency, feed = memory.residency, _feed(settings, memory)
    adapters = AdapterDesk(settings.max_loras)
    group = WorkerGroup(
        _terms(settings, facts, limits),
        mailbox,
        incarnation=incarnation,
        hash_algorithm=algorithm,
        hash_seed=settings.hash_seed,
        adapters=adapters,
    )
    engine = Engine(
        _scheduler(settings, limits, algorithm, memory),
        group,
        mailbox,
        incarnation=incarnation,
        worker_wait_s=settings.worker_wait,
        step_timeout_s=settings.step_timeout,
        tenant_weights=settings.weights_by_tenant(),
        observers=[StepMetrics(registry)],
        after_turn=KvWatch(
            memory,
            mailbox.wake,
            residency=ResidencyMetrics(registry, residency) if residency else None,
            feed=feed,
        ).turn,
        tracer=traces.steps if traces else None,
        adapters=adapters,
        max_embedding_bytes=settings.max_embedding_bytes,
    )
    front = _front_end(settings, facts, limits, release, registry, traces)
    return _Parts(group, engine, front, feed)


def _front_end(
    settings: SchedulerSettings,
    facts: ModelFacts,
    limits: Limits,
    release: str,
    registry: CollectorRegistry,
    traces: Tracing | None,
) -> FrontEnd:
    path = Path(settings.model_path)
    return FrontEnd.for_model(
        facts,
        Tokenizer.from_path(path),
        served_names=tuple(settings.served_model_name) or (path.stem,),
        limits=limits,
        max_logprobs=settings.max_logprobs,
        version=release,
        protocol_version=PROTOCOL_VERSION,
        metrics=RequestMetrics(registry),
        tracer=traces.requests if traces else None,
    )


def _feed(settings: SchedulerSettings, memory: KvMemory) -> KvEventFeed | None:
    """Return who tells the events of the cache. None: nobody is to hear of them."""
    if memory.events is None:
        return None
    # Microseconds: no server makes so many events that the next one's numbers are lower.
    return KvEventFeed(settings.kv_events_buffer, first_number=time.time_ns() // 1000)


def _log_start(settings: SchedulerSettings, front: FrontEnd, metrics_page: str | None) -> None:
    limits = front.limits
    log = structlog.get_logger("server")
    log.info(
        "starting",
        version=front.version,
        model=settings.model_path,
        served_as=",".join(front.served_names),
        max_model_len=limits.max_model_len,
        block_size=limits.block_size,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        pipeline_depth=limits.pipeline_depth,
        tensor_parallel_size=settings.tensor_parallel_size,
        metrics=metrics_page or "off",
    )
    algorithm = HASH_ALGORITHMS[settings.prefix_caching_hash_algo]
    if settings.enable_prefix_caching and not algorithm.resists_collisions:
        log.warning(
            "block names can be forged: for trusted input of a single tenant only",
            prefix_caching_hash_algo=algorithm.name,
        )


def _limits(settings: SchedulerSettings, facts: ModelFacts) -> Limits:
    longest = facts.max_position_embeddings
    max_model_len = settings.max_model_len or longest
    if max_model_len > longest:
        raise ConfigError(
            f"max_model_len is {max_model_len}, must be at most {longest}, for which the model "
            "was made"
        )
    return Limits(
        block_size=settings.block_size,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=max_model_len,
        max_waiting_requests=settings.max_waiting_requests,
        pipeline_depth=settings.pipeline_depth,
        max_waiting_tokens=settings.max_waiting_tokens,
        long_prefill_token_threshold=settings.long_prefill_token_threshold,
        max_long_prefills=settings.max_long_prefills,
        num_draft_tokens=(0 if settings.speculation == "off" else settings.num_speculative_tokens),
    )


def _memory(settings: SchedulerSettings) -> KvMemory:
    residency = None
    if settings.kv_cache_metrics:
        residency = Residency(settings.kv_cache_metrics_sample, secrets.SystemRandom().random)
    return KvMemory(
        EVICTION_POLICIES[settings.eviction_policy],
        residency=residency,
        events=KvEventLog() if settings.enable_kv_cache_events else None,
        max_pinned_share=settings.max_pinned_share,
    )


def _scheduler(
    settings: SchedulerSettings, limits: Limits, algorithm: HashAlgorithm, memory: KvMemory
) -> Scheduler:
    return Scheduler(
        limits,
        enable_prefix_caching=settings.enable_prefix_caching,
        hash_algorithm=algorithm,
        waiting=waiting_queue(
            settings.scheduling_policy, ageing_ns=int(settings.priority_ageing * 1e9)
        ),
        choose_victim=VICTIM_POLICIES[settings.preemption_victim],
        memory=memory,
    )


def _terms(settings: SchedulerSettings, facts: ModelFacts, limits: Limits) -> JoinTerms:
    return JoinTerms(
        block_size=limits.block_size,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        pipeline_depth=limits.pipeline_depth,
        num_blocks_override=settings.num_gpu_blocks_override or 0,
        vocab_size=facts.vocab_size,
        join_secret=settings.join_secret.get_secret_value(),
        tensor_parallel_size=_ranks(settings, facts),
        max_adapters=settings.max_loras,
    )


def _ranks(settings: SchedulerSettings, facts: ModelFacts) -> int:
    ranks = settings.tensor_parallel_size
    if facts.num_heads is not None and ranks > facts.num_heads:
        raise ConfigError(
            f"tensor_parallel_size is {ranks}, must be at most {facts.num_heads}, the query heads "
            "of the model"
        )
    return ranks
