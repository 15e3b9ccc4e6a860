"""One worker's stream, from its hello to its end: order, heartbeats, and what goes out."""

import asyncio
import time
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import grpc

from pagemill.v1 import worker_pb2
from scheduler_svc.core.step_plan import StepPlan
from scheduler_svc.service.group_events import StepArrived
from scheduler_svc.service.server_state import WorkerState
from scheduler_svc.service.worker_wire import (
    MAX_REASON_CHARACTERS,
    Epoch,
    MalformedMessageError,
    decode_message,
    decode_result,
    encode_plan,
)

MISSED_HEARTBEATS = 3


@dataclass(frozen=True, slots=True)
class SentPlan:
    """A plan that is on its way to the workers."""

    epoch_number: int
    num_bytes: int
    encoded_ns: int
    sent_ns: int


@dataclass(frozen=True, slots=True)
class Ending:
    """Why we end a stream, for the worker to read."""

    code: grpc.StatusCode
    reason: str


class LinkOwner(Protocol):
    """Who wants to know what a worker says: its group."""

    def rank_loaded(self, link: "WorkerLink", rendezvous_port: int) -> None:
        """Note that a rank of several can meet the others. Called once."""

    def worker_ready(self, link: "WorkerLink", ready: worker_pb2.WorkerReady) -> None:
        """Note that the worker can take plans."""

    def step_arrived(self, link: "WorkerLink", step: StepArrived) -> None:
        """Note a result that came in order."""

    def adapter_answered(self, link: "WorkerLink", answer: worker_pb2.AdapterAnswer) -> None:
        """Note how the load of an adapter ended."""

    def num_plans_sent(self) -> int:
        """Return how many plans the leader has got on the stream it has now."""

    def worker_gone(self, link: "WorkerLink", reason: str) -> None:
        """Note that the stream has ended. Called once."""


class WorkerLink:
    """A joined worker.

    The servicer feeds `receive` and writes what `next_outgoing` gives. Either side may end
    it: `fail` with a status for the worker, `close` when nobody listens any more. Both tell
    the group at once; whatever comes later is ignored.

    Out go an ack, a rendezvous, at most `pipeline_depth` plans, a stop, and as many changes of
    adapters as there are slots and callers: that bounds the outbox.
    """

    def __init__(
        self, hello: worker_pb2.WorkerHello, ack: worker_pb2.JoinAck, owner: LinkOwner
    ) -> None:
        self.boot_id: int = hello.boot_id
        self.rank: int = ack.rank
        self.host: str = hello.host
        """Address other ranks can reach it at. Empty: same host."""
        self.model = hello.model
        self.epoch: Epoch | None = None
        """Set by the group once the worker takes plans."""
        self.device_uuid: str = ack.device_uuid
        self._device = ack.device_uuid
        for device in hello.devices:
            if device.uuid == ack.device_uuid:
                self._device = device.kind
        self.num_plans = 0
        """Sent on this stream."""
        self._owner = owner
        self._phase = worker_pb2.WORKER_PHASE_LOADING
        self._said_loaded = ack.world_size == 1
        self._said_ready = False
        self._steps_in_flight: deque[int] = deque()

        self._outbox = deque([worker_pb2.JoinResponse(ack=ack).SerializeToString()])
        self._outbox_changed = asyncio.Event()
        self._closed = False
        self._ending: Ending | None = None

        self._heartbeat_s: float = ack.heartbeat_s
        self._loop = asyncio.get_running_loop()
        self._heard_at = self._loop.time()
        self._look_at = self._heard_at + self._heartbeat_s
        self._silence_timer = self._loop.call_at(self._look_at, self._check_silence)

    @property
    def ending(self) -> Ending | None:
        """Why we ended the stream. None: we did not."""
        return self._ending

    def state(self) -> WorkerState:
        """Return what is known of the worker now."""
        phase = worker_pb2.WorkerPhase.Name(self._phase)
        return WorkerState(
            rank=self.rank,
            boot_id=self.boot_id,
            device=self._device,
            dtype=self.model.dtype,
            phase=phase.removeprefix("WORKER_PHASE_").lower(),
        )

    # What goes out.

    def send_plan(self, plan: StepPlan, traceparent: str) -> SentPlan:
        """Queue a plan of the current epoch. The worker must be ready."""
        if self.epoch is None:
            raise ValueError(f"worker of rank {self.rank} got a plan before it was ready")
        message = encode_plan(plan, self.epoch, traceparent)
        encoded_ns = time.monotonic_ns()
        self.num_plans += 1
        self._steps_in_flight.append(plan.step_id)
        self._outbox.append(message)
        self._outbox_changed.set()
        return SentPlan(self.epoch.number, len(message), encoded_ns, time.monotonic_ns())

    def send_adapter(self, change: worker_pb2.AdapterChange) -> None:
        """Queue a change of an adapter, behind the plans that were sent to the group."""
        change.num_plans_before = self._owner.num_plans_sent()
        self._send(worker_pb2.JoinResponse(adapter=change))

    def send_rendezvous(self, address: str) -> None:
        """Tell the worker where its group meets."""
        rendezvous = worker_pb2.Rendezvous(address=address)
        self._send(worker_pb2.JoinResponse(rendezvous=rendezvous))

    def send_stop(self) -> None:
        """Ask the worker to finish what it has and exit."""
        self._send(worker_pb2.JoinResponse(stop=worker_pb2.StopWorker()))

    def _send(self, message: worker_pb2.JoinResponse) -> None:
        self._outbox.append(message.SerializeToString())
        self._outbox_changed.set()

    async def next_outgoing(self) -> bytes | None:
        """Return the next message for the worker, or None when the link has ended.

        Waits as long as nothing is to be said; heartbeats bound that.
        """
        while not self._closed:
            if self._outbox:
                return self._outbox.popleft()
            self._outbox_changed.clear()
            await self._outbox_changed.wait()
        return None

    # What comes in.

    def receive(self, raw: bytes) -> None:
        """Take a message. One that does not fit ends the link with ABORTED."""
        if self._closed:
            return
        received_ns = time.monotonic_ns()
        self._heard_at = self._loop.time()
        try:
            self._take(decode_message(raw), len(raw), received_ns)
        except MalformedMessageError as error:
            self.fail(grpc.StatusCode.ABORTED, str(error))

    def _take(self, message: worker_pb2.JoinRequest, num_bytes: int, received_ns: int) -> None:
        match message.WhichOneof("message"):
            case "result":
                self._take_result(message.result, num_bytes, received_ns)
            case "heartbeat":
                if message.heartbeat.phase in worker_pb2.WorkerPhase.values():
                    self._phase = message.heartbeat.phase
            case "loaded":
                self._take_loaded(message.loaded)
            case "ready":
                self._take_ready(message.ready)
            case "adapter":
                answer = message.adapter
                answer.error = answer.error[:MAX_REASON_CHARACTERS]
                self._owner.adapter_answered(self, answer)
            case "failure":
                kind = "for good" if message.failure.permanent else "for now"
                reason = message.failure.reason[:MAX_REASON_CHARACTERS]
                self.fail(grpc.StatusCode.ABORTED, f"it failed {kind}: {reason}")
            case kind:
                raise MalformedMessageError(f"a message of kind {kind} was not expected")

    def _take_loaded(self, loaded: worker_pb2.RankLoaded) -> None:
        if self._said_loaded:
            raise MalformedMessageError("loaded was not expected")
        self._said_loaded = True
        self._owner.rank_loaded(self, loaded.rendezvous_port)

    def _take_ready(self, ready: worker_pb2.WorkerReady) -> None:
        if self._said_ready:
            raise MalformedMessageError("ready came twice")
        self._said_ready = True
        self._phase = worker_pb2.WORKER_PHASE_IDLE
        self._owner.worker_ready(self, ready)

    def _take_result(
        self, message: worker_pb2.StepResult, num_bytes: int, received_ns: int
    ) -> None:
        answer = decode_result(message, self.model.vocab_size)
        if self.epoch is None or not answer.epoch.is_up_to(self.epoch):
            raise MalformedMessageError(f"result is of {answer.epoch}, which has not begun")
        if answer.epoch != self.epoch:
            # It was under way when the connection before this one broke.
            return
        step_id = answer.result.step_id
        expected = self._steps_in_flight.popleft() if self._steps_in_flight else None
        if step_id != expected:
            raise MalformedMessageError(f"result is of step {step_id}, expected {expected}")
        decoded_ns = time.monotonic_ns()
        self._owner.step_arrived(self, StepArrived(answer, num_bytes, received_ns, decoded_ns))

    # Its end.

    def fail(self, code: grpc.StatusCode, reason: str) -> None:
        """End the stream with a status."""
        if not self._closed:
            self._ending = Ending(code, reason)
            self.close(reason)

    def close(self, reason: str) -> None:
        """End the link: the worker is gone, or told why. The first reason is kept."""
        if self._closed:
            return
        self._closed = True
        self._silence_timer.cancel()
        self._outbox.clear()
        self._outbox_changed.set()
        self._owner.worker_gone(self, reason)

    def _check_silence(self) -> None:
        """Look once a heartbeat, so that a sleep of this very process shows as a late look."""
        limit = MISSED_HEARTBEATS * self._heartbeat_s
        now = self._loop.time()
        if now - self._look_at >= self._heartbeat_s / 2:
            # Stopped, or starved: what the worker said may still lie in its socket, and who was
            # stopped with us has said nothing yet.
            self._heard_at = max(self._heard_at, now - limit + self._heartbeat_s)
        if now - self._heard_at >= limit:
            self.fail(grpc.StatusCode.ABORTED, f"no heartbeat for {now - self._heard_at:.1f} s")
            return
        self._look_at = min(now + self._heartbeat_s, self._heard_at + limit)
        self._silence_timer = self._loop.call_at(self._look_at, self._check_silence)
