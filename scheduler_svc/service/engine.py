"""The one loop, and the door to it: requests in, plans out, results in, tokens out."""

import asyncio
import time
from array import array
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import chain
from typing import Protocol

import structlog

from scheduler_svc.core.block_hash import ExtraKeys
from scheduler_svc.core.errors import (
    AdapterLoadError,
    DeadlineError,
    RequestError,
    UnavailableError,
    UnknownPinError,
)
from scheduler_svc.core.plan_pacing import PlanPacing
from scheduler_svc.core.request import Request
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step_pace import StepPace
from scheduler_svc.core.step_plan import StepPlan
from scheduler_svc.service.adapter_desk import AdapterDesk
from scheduler_svc.service.deadline_timer import at_deadline
from scheduler_svc.service.engine_door import Submission
from scheduler_svc.service.engine_load import load_of
from scheduler_svc.service.group_events import (
    AdapterLost,
    GroupLost,
    GroupReady,
    Mailbox,
    StepArrived,
)
from scheduler_svc.service.held_bytes import HeldBytes
from scheduler_svc.service.live_streams import LiveStreams
from scheduler_svc.service.outside_changes import OutsideChanges
from scheduler_svc.service.plan_timer import PlanTimer
from scheduler_svc.service.request_log import log_end
from scheduler_svc.service.request_making import make_request
from scheduler_svc.service.server_state import GroupState, Load, ServerState
from scheduler_svc.service.serving_flag import ServingFlag
from scheduler_svc.service.step_flight import Flight, Landing
from scheduler_svc.service.step_observers import StepObservers
from scheduler_svc.service.step_record import RecentSteps, StepObserver, StepTracer
from scheduler_svc.service.step_watchdog import StepWatchdog
from scheduler_svc.service.token_stream import RequestStream, pile_told, too_slow
from scheduler_svc.service.worker_link import SentPlan


class PlanSender(Protocol):
    """What the engine needs of a worker group; the rest comes through the mailbox."""

    def send(self, plan: StepPlan, traceparent: str) -> SentPlan:
        """Send a plan to a ready group."""

    def drop_worker(self, reason: str) -> None:
        """End the connection of a worker whose result does not fit its plan, or does not come."""

    def state(self) -> GroupState:
        """Return what is known of the group now."""


class Engine:
    """Owns the scheduler. Everything here runs on one event loop, so nothing is locked.

    `run` is the loop; the other methods are the door (`EngineDoor`). The door changes the
    scheduler between two turns of the loop and wakes it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        group: PlanSender,
        mailbox: Mailbox,
        *,
        incarnation: int,
        worker_wait_s: float,
        step_timeout_s: float = 300.0,
        tenant_weights: Mapping[str, float] | None = None,
        observers: Sequence[StepObserver] = (),
        after_turn: Callable[[int], None] | None = None,
        tracer: StepTracer | None = None,
        adapters: AdapterDesk | None = None,
        max_embedding_bytes: int = 1 << 30,
    ) -> None:
        self.serving = ServingFlag()
        self._scheduler = scheduler
        self._group = group
        self._scheduling = OutsideChanges(scheduler, mailbox)
        self.adapters = adapters or AdapterDesk(0)
        self._held_bytes = HeldBytes(max_embedding_bytes)
        self._mailbox = mailbox
        self._incarnation = incarnation
        self._worker_wait_s = worker_wait_s
        self._tenant_weights = tenant_weights or {}
        self._recent = RecentSteps()
        tracers = [tracer] if tracer else []
        self._observers = StepObservers((self._recent, *observers, *tracers))
        self._tracer = tracer
        self._after_turn = after_turn
        self._live = LiveStreams()
        self._flights: deque[Flight] = deque()
        self._pacing = PlanPacing()
        self._pace = StepPace()
        self._watchdog = StepWatchdog(
            step_timeout_s, lambda: self._pace.slowest_ns() / 1e9, self._drop_hung_worker
        )
        self._plan_timer = PlanTimer(mailbox.wake)
        self._ready = False
        self._draining = False
        self._stopping = False
        self._absent_since_ns = time.monotonic_ns()
        self._log = structlog.get_logger("engine")

    # The loop.

    async def run(self) -> None:
        """Serve until cancelled.

        A turn takes what arrived, sends what can be planned, and only then hands tokens out:
        the worker's next plan goes before the streams.
        """
        self._absent_since_ns = time.monotonic_ns()
        wait = asyncio.get_running_loop().call_later(self._worker_wait_s, self._end_wait)
        try:
            while True:
                landings: list[Landing] = []
                for event in self._mailbox.take():
                    match event:
                        case StepArrived():
                            landings += self._land(event)
                        case GroupReady():
                            wait.cancel()
                            self._begin_epoch(event)
                        case GroupLost():
                            wait = self._lose_group()
                        case AdapterLost():
                            self._lose_adapter(event)
                self._send_plans()
                for landing in landings:
                    self._emit(landing)
                if self._after_turn is not None:
                    self._after_turn(time.monotonic_ns())
                await self._mailbox.wait()
        except Exception:
            self._log_state()
            raise
        finally:
            wait.cancel()
            self._watchdog.stop()
            self._plan_timer.stop()

    def _send_plans(self) -> None:
        begin_ns = time.monotonic_ns()
        while self._ready and self._may_plan(begin_ns):
            plan = self._scheduler.schedule(begin_ns)
            for request in self._scheduler.take_expired():
                if request in self._live.piles:
                    self._fail(self._live.piles[request].stream, _too_late())
            if plan is None:
                return
            end_ns = time.monotonic_ns()
            traceparent = self._tracer.traceparent(plan.step_id) if self._tracer else ""
            sent = self._group.send(plan, traceparent)
            self._pacing.step_sent(sent.sent_ns, worker_idle=not self._flights)
            self._flights.append(Flight(plan, sent, begin_ns, end_ns, traceparent))
            if len(self._flights) == 1:
                self._watchdog.begin()
            begin_ns = time.monotonic_ns()

    def _may_plan(self, now_ns: int) -> bool:
        """Whether the next plan need wait no longer for arrivals; else look again when due."""
        wait_ns = self._pacing.due_ns() - now_ns if self._flights else 0
        if wait_ns <= 0:
            return True
        self._plan_timer.set(wait_ns)
        return False

    def _land(self, arrived: StepArrived) -> list[Landing]:
        """Apply a result. One that does not fit its plan costs its worker the connection."""
        self._pacing.step_landed(arrived.received_ns, arrived.answer.timing.execute_ns)
        try:
            outcome = self._scheduler.apply(arrived.answer.result, time.monotonic_ns())
        except ValueError as error:
            self._group.drop_worker(str(error))
            return []
        flight = self._flights.popleft()
        if self._flights:
            self._watchdog.begin()
        else:
            self._watchdog.rest()
        self._pace.note(flight.plan.num_tokens, arrived.answer.timing.execute_ns)
        return [Landing(flight, arrived, outcome, time.monotonic_ns())]

    def _drop_hung_worker(self, taken_s: float) -> None:
        """End the connection of a worker that does not answer; its requests go on elsewhere."""
        step_id = self._flights[0].plan.step_id
        self._log.error("step hangs", step_id=step_id, seconds=round(taken_s, 3))
        self._log_state()
        self._group.drop_worker(f"step {step_id} gave no result for {taken_s:.1f} s")

    def _log_state(self) -> None:
        for line in self._scheduler.dump(time.monotonic_ns()).splitlines():
            self._log.error("state", line=line)

    def _begin_epoch(self, event: GroupReady) -> None:
        now_ns = time.monotonic_ns()
        self._ready = True
        self.serving.set(not self._draining)
        if event.kept_cache:
            self._scheduler.rejoin(now_ns)
            return
        unfit = self._scheduler.start_epoch(event.num_blocks, event.root, now_ns, event.kv_groups)
        for request in unfit:
            self._live.piles[request].stream.end_unfit()

    def _lose_group(self) -> asyncio.TimerHandle:
        self._ready = False
        self.serving.set(False)
        self._flights.clear()
        self._watchdog.rest()
        self._pacing.forget()
        self._pace.forget()
        self._absent_since_ns = time.monotonic_ns()
        self._scheduler.lose_worker(self._absent_since_ns)
        return asyncio.get_running_loop().call_later(self._worker_wait_s, self._end_wait)

    def _lose_adapter(self, lost: AdapterLost) -> None:
        """End the requests of an adapter that came back with no worker."""
        for stream in self._live.of_adapter(lost.slot):
            self._fail(stream, AdapterLoadError(lost.reason))

    def _end_wait(self) -> None:
        if not self._ready:
            self.fail_all(self._no_worker())

    def _emit(self, landing: Landing) -> None:
        """Hand a step's tokens to their streams, and tell the observers.

        Cost: 0.5 us per token with a waiting reader, 2 cores, Python 3.11.
        """
        outcome, piles = landing.outcome, self._live.piles
        step_id = outcome.step_id
        for request, token in zip(outcome.requests, outcome.tokens, strict=True):
            pile = piles.get(request)
            if pile is not None and not pile.push(token, step_id):
                self._fail(pile.stream, too_slow(pile.stream))
        pile_told(piles, outcome)
        ended = (piles[request].stream for request in outcome.finished if request in piles)
        for stream in dict.fromkeys(ended):
            stream.end_finished()
        scheduler = self._scheduler
        record = landing.record(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            emitted_ns=time.monotonic_ns(),
        )
        self._observers.step(record)

    # The door: one request.

    @asynccontextmanager
    async def open(self, submission: Submission) -> AsyncIterator[RequestStream]:
        """Submit a request and yield its stream. Leaving the block ends the request.

        Raises: RequestError, before anything is queued.
        """
        with (
            self.adapters.using(submission.adapter) as adapter,
            self._held_bytes.of(submission),
        ):
            weight = self._tenant_weights.get(submission.tenant, 1.0)
            async with self._streaming(submission, make_request(submission, weight, adapter)) as it:
                yield it

    @asynccontextmanager
    async def _streaming(
        self, submission: Submission, request: Request
    ) -> AsyncIterator[RequestStream]:
        self._check_taking(submission)
        with self._scheduling() as scheduler:
            scheduler.add(request, time.monotonic_ns(), self._pace)
        stream = RequestStream(request, self._stop, submission.call_id)
        self._live.add(stream)
        try:
            with at_deadline(submission.deadline_ns, lambda: self._fail(stream, _too_late())):
                yield stream
        finally:
            self._live.remove(stream)
            self._abandon(stream)
            log_end(self._log, stream)

    def _check_taking(self, submission: Submission) -> None:
        now_ns = time.monotonic_ns()
        if self._draining:
            raise UnavailableError("the server drains and takes no new requests")
        absent_s = (now_ns - self._absent_since_ns) / 1e9
        if not self._ready and absent_s >= self._worker_wait_s:
            raise self._no_worker()
        if submission.deadline_ns is not None and submission.deadline_ns <= now_ns:
            raise DeadlineError("the deadline had passed when the request came")

    def _stop(self, request: Request, num_output_tokens: int) -> None:
        with self._scheduling() as scheduler:
            scheduler.finish(request, num_output_tokens, time.monotonic_ns())

    def _fail(self, stream: RequestStream, error: RequestError) -> None:
        """End a request with an error for its reader, and free what it holds."""
        stream.fail(error)
        self._abandon(stream)

    def _abandon(self, stream: RequestStream) -> None:
        """Free what a request holds whose reader gets nothing more."""
        self._live.close_piles(stream)
        with self._scheduling() as scheduler:
            scheduler.abort_family(stream.request, time.monotonic_ns())

    def _no_worker(self) -> UnavailableError:
        return UnavailableError(f"no worker has been ready for {self._worker_wait_s:g} s")

    # The door: all of them.

    @property
    def num_live(self) -> int:
        """Requests whose readers have not left."""
        return len(self._live.streams)

    def abort(self, tenant: str, request_ids: Sequence[str] | None) -> tuple[list[str], list[str]]:
        """End a tenant's live requests; see EngineDoor. Cost: O(live requests)."""
        found = self._live.named(tenant, request_ids)
        self._abort(list(dict.fromkeys(chain.from_iterable(found.values()))))
        return list(found), [each for each in dict.fromkeys(request_ids or ()) if each not in found]

    def abort_everyone(self) -> list[str]:
        """End the live requests of all tenants; see EngineDoor."""
        live = self._live.live()
        self._abort(live)
        return [name for _, name in dict.fromkeys((it.request.tenant, it.call_id) for it in live)]

    def _abort(self, streams: Sequence[RequestStream]) -> None:
        with self._scheduling() as scheduler:
            for stream in streams:
                scheduler.abort_family(stream.request, time.monotonic_ns())
                stream.end_finished()

    def fail_all(self, error: UnavailableError) -> None:
        """End every live request with an error."""
        for stream in list(self._live.streams.values()):
            self._fail(stream, error)

    def load(self) -> Load:
        """Return how busy the engine is now."""
        return load_of(self._scheduler, self._recent.times(), len(self.adapters.loaded()))

    def server_state(self) -> ServerState:
        """Return what stands behind the door now."""
        return ServerState(self._incarnation, self._draining, (self._group.state(),))

    def flush_cache(self) -> int:
        """Forget the names of all cached blocks; return how many."""
        with self._scheduling() as scheduler:
            return scheduler.flush_cache()

    def pin(self, tokens: "array[int]", extra: ExtraKeys, time_to_live_s: float) -> tuple[str, int]:
        """Keep what is cached of a prefix; see EngineDoor."""
        expires_ns = time.monotonic_ns() + int(time_to_live_s * 1e9)
        with self._scheduling() as scheduler:
            pin = scheduler.pin(tokens, extra, expires_ns)
        # A number alone could name another pin after a restart.
        return f"{self._incarnation:016x}-{pin.number}", len(pin.blocks)

    def unpin(self, pin_id: str) -> None:
        """Let go of a pin; see EngineDoor."""
        incarnation, _, number = pin_id.partition("-")
        is_ours = incarnation == f"{self._incarnation:016x}" and number.isdecimal()
        with self._scheduling() as scheduler:
            if not (is_ours and len(number) < 20 and scheduler.unpin(int(number))):
                raise UnknownPinError("no pin has this pin_id; it may have ended")

    async def drain(self, *, for_good: bool = False) -> None:
        """Refuse new requests, and return when none is left; `for_good`: nothing resumes then."""
        self._draining = True
        self._stopping |= for_good
        self.serving.set(False)
        await self._live.wait_until_empty()

    def resume(self) -> None:
        """Take new requests again, unless the server stops."""
        self._draining = self._stopping
        self.serving.set(self._ready and not self._draining)


def _too_late() -> DeadlineError:
    return DeadlineError("the deadline passed before the request had ended")
