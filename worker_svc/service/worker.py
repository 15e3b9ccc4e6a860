"""The worker: joins, loads its model once, runs steps, and joins again when the stream is lost."""

import contextlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pagemill.v1 import worker_pb2
from worker_svc.errors import ConfigError, InvariantError, RanksLostError
from worker_svc.model.shard import Shard
from worker_svc.runtime.memory_budget import MemoryReport, startup_lines
from worker_svc.service.adapter_loading import AdapterLoading
from worker_svc.service.backoff import LONGEST_DELAY_S, Backoff
from worker_svc.service.exit_status import ExitStatus
from worker_svc.service.heartbeat import HeartbeatThread
from worker_svc.service.joining import Assignment, make_hello, read_assignment
from worker_svc.service.launch_loop import LaunchLoop
from worker_svc.service.logs import Logger
from worker_svc.service.meeting import meeting
from worker_svc.service.model_host import CacheLimits, LaunchRunner, ModelHost, StepRunner
from worker_svc.service.process_group import ProcessGroup
from worker_svc.service.shutdown import Shutdown
from worker_svc.service.start_clock import StartClock
from worker_svc.service.step_loop import StepLoop
from worker_svc.service.step_stream import RefusedError, StepStream, StreamLostError
from worker_svc.service.worker_status import Phase, WorkerStatus

ACK_DEADLINE_S: Final = 30.0
"""For the connection and the scheduler's first message."""

_PATIENCE_HEARTBEATS: Final = 4
"""The scheduler misses a rank after three."""


@dataclass(frozen=True, slots=True)
class JoinSettings:
    """Where and how to join."""

    address: str
    """HOST:PORT or unix:PATH."""

    secret: str
    """Shared with the scheduler. Empty: none."""

    timeout_s: float
    """Seconds without a scheduler after which to give up. 0: never."""

    rank_host: str = "127.0.0.1"
    """Address at which the other ranks of a group reach this one."""


@dataclass(frozen=True, slots=True, eq=False)
class _Cache:
    """A runner with its cache, and what it was made for."""

    limits: CacheLimits
    shard: Shard
    runner: StepRunner
    report: MemoryReport


class Worker:
    """One process's worth of a worker.

    Model, rows and KV cache outlive a lost stream; the boot id, the same on return, tells the
    scheduler so. A scheduler that asks for other limits on return, or another rank, needs another
    cache: the worker drops the one it has, takes a new boot id and joins as a new process would,
    but for the model it has loaded. So nobody counts on content that is gone.
    """

    def __init__(
        self,
        host: ModelHost,
        settings: JoinSettings,
        shutdown: Shutdown,
        log: Logger,
        exit_now: Callable[[], None],
        clock: StartClock | None = None,
    ) -> None:
        """Call `exit_now` when asked to stop while the model loads: there is no step to finish.

        The first time that it has joined it logs what the clock has of its start.
        """
        self._host = host
        self._settings = settings
        self._shutdown = shutdown
        self._log = log
        self._exit_now = exit_now
        self._clock = clock or StartClock(time.monotonic())
        self._has_started = False
        self._adapters = AdapterLoading(host.adapters, log)
        self._status = WorkerStatus()
        self._backoff = Backoff(secrets.SystemRandom().random)
        self._boot_id = secrets.randbits(64)
        self._cache: _Cache | None = None
        self._group: ProcessGroup | None = None
        """The other ranks, if there are any: as long as this one has the same part of the model."""
        self._last_joined_s = time.monotonic()

    def run(self) -> ExitStatus:
        """Serve until asked to stop, refused, or broken. Returns which."""
        with contextlib.closing(self._adapters):
            return self._run()

    def _run(self) -> ExitStatus:
        while not self._shutdown.asked:
            try:
                ended = self._serve_one_stream()
            except RefusedError as error:
                self._log.error("refused by the scheduler", reason=str(error))
                return ExitStatus.REFUSED
            except StreamLostError as error:
                ended = self._wait_to_dial("no scheduler", str(error))
            except RanksLostError as error:
                ended = self._wait_to_dial("ranks lost", str(error))
            if ended is not None:
                return ended
        return ExitStatus.STOPPED

    def _wait_to_dial(self, event: str, reason: str) -> ExitStatus | None:
        alone_s = time.monotonic() - self._last_joined_s
        if 0 < self._settings.timeout_s < alone_s:
            self._log.error(event, reason=reason, seconds=round(alone_s, 1))
            return ExitStatus.NO_SCHEDULER
        delay_s = self._backoff.next_delay_s()
        self._log.warning(event, reason=reason, retry_in_s=round(delay_s, 2))
        self._shutdown.wait(delay_s)
        return None

    def _serve_one_stream(self) -> ExitStatus | None:
        """Dial, and serve until the stream ends. None: dial again."""
        settings, rank = self._settings, self._group.shard.rank if self._group else None
        hello = make_hello(self._host, self._boot_id, settings.secret, settings.rank_host, rank)
        with StepStream(self._settings.address, hello) as stream:
            try:
                return self._serve(stream, hello)
            except (StreamLostError, RefusedError, RanksLostError):
                raise
            except ConfigError as error:
                self._log.error("impossible", reason=str(error))
                return _end(stream, str(error), ExitStatus.IMPOSSIBLE)
            except Exception as error:  # noqa: BLE001 the outermost frame of a worker's work
                self._log.error("failed", exc_info=error)
                return _end(stream, f"{type(error).__name__}: {error}", ExitStatus.FAILED)

    def _serve(self, stream: StepStream, hello: worker_pb2.WorkerHello) -> ExitStatus | None:
        with self._shutdown.waking(stream.wake):
            first = stream.receive(ACK_DEADLINE_S)
        if first is None or isinstance(first, worker_pb2.StopWorker):
            return ExitStatus.STOPPED
        if not isinstance(first, worker_pb2.JoinAck):
            raise InvariantError(f"a {type(first).__name__} came before the acknowledgement")
        self._clock.ended("dial")
        assignment = read_assignment(first, hello)
        if self._has_another_cache(assignment):
            return None
        self._take_place(assignment)
        with HeartbeatThread(self._status, stream.send_heartbeat, assignment.heartbeat_s):
            try:
                return self._work(stream, assignment)
            except RanksLostError:
                # The scheduler knows who was lost, and ends the stream then. If this one left of
                # itself it might be first, be taken for that one and lose its place.
                stream.over.wait(_PATIENCE_HEARTBEATS * assignment.heartbeat_s)
                raise

    def _has_another_cache(self, assignment: Assignment) -> bool:
        """Drop a cache that was made for another place. Returns whether there was one."""
        cache = self._cache
        if cache is None or (cache.limits, cache.shard) == (assignment.limits, assignment.shard):
            return False
        self._log.warning(
            "other limits than before: the cache is dropped",
            old=(cache.limits, cache.shard),
            new=(assignment.limits, assignment.shard),
        )
        self._cache = None
        self._boot_id = secrets.randbits(64)
        return True

    def _take_place(self, assignment: Assignment) -> None:
        self._host.use(assignment.device_uuid)
        shard = assignment.shard
        if shard.is_whole:
            self._group = None
        elif self._group is None or self._group.shard != shard:
            self._group = ProcessGroup(shard, self._host.device.kind)

    def _work(self, stream: StepStream, assignment: Assignment) -> ExitStatus:
        """Load, meet the other ranks, and run plans."""
        if self._cache is None:
            with self._shutdown.waking(self._exit_now):
                self._status.enter(Phase.LOADING)
                self._host.load(self._group)
            self._clock.ended("load")
        if self._group is None:
            return self._run_plans(stream, assignment)
        with meeting(stream, self._group, self._settings.rank_host, self._shutdown) as met:
            return self._run_plans(stream, assignment) if met else ExitStatus.STOPPED

    def _run_plans(self, stream: StepStream, assignment: Assignment) -> ExitStatus:
        cache, num_blocks = self._prepare(assignment)
        stream.send_ready(
            worker_pb2.WorkerReady(
                num_blocks=num_blocks,
                block_bytes=cache.report.block_bytes,
                weight_bytes=cache.report.weight_bytes,
                load_s=cache.report.load_seconds,
            )
        )
        shard = assignment.shard
        self._log.info(
            "joined",
            group=assignment.group,
            rank=shard.rank,
            world_size=shard.world_size,
            boot_id=f"{self._boot_id:016x}",
        )
        if not self._has_started:
            self._clock.ended("cache")
            self._log.info("started", **self._clock.seconds())
            self._has_started = True
        joined_s = time.monotonic()
        try:
            self._loop(cache.runner, shard).run(stream)
        finally:
            self._last_joined_s = time.monotonic()
            # A scheduler that takes us and drops us at once must not be dialled in a loop.
            if self._last_joined_s - joined_s > LONGEST_DELAY_S:
                self._backoff.reset()
        return ExitStatus.STOPPED

    def _loop(self, runner: StepRunner, shard: Shard) -> StepLoop | LaunchLoop:
        if isinstance(runner, LaunchRunner):
            return LaunchLoop(runner, self._adapters, self._status, self._shutdown, self._log)
        return StepLoop(
            runner, self._adapters, self._status, self._shutdown, self._log, answers=shard.leads
        )

    def _prepare(self, assignment: Assignment) -> tuple[_Cache, int]:
        """Return a runner, made now if there is none, and how many blocks all ranks have."""
        if self._group is not None:
            self._host.agree()
        if self._cache is None:
            with self._shutdown.waking(self._exit_now):
                self._status.enter(Phase.SIZING)
                runner, report = self._host.make_runner(assignment.limits)
            for line in startup_lines(report):
                self._log.info(line)
            self._cache = _Cache(assignment.limits, assignment.shard, runner, report)
            num_blocks = report.num_blocks
        else:
            num_blocks = self._cache.report.num_blocks
            if self._group is not None:
                # A rank that is new agrees with the others, before it makes its cache.
                num_blocks = self._group.least(num_blocks)
        self._status.enter(Phase.IDLE)
        return self._cache, num_blocks


def _end(stream: StepStream, reason: str, status: ExitStatus) -> ExitStatus:
    """Tell the scheduler why the worker ends, if it can still be told, and return the status."""
    sentence = " ".join(reason.split())
    with contextlib.suppress(StreamLostError):
        stream.send_failure(sentence, permanent=status is ExitStatus.IMPOSSIBLE)
    return status
