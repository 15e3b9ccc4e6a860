"""One connection to the scheduler: plans come in, results and heartbeats go out.

A thread of ours reads and decodes, so that the next plan is ready while a step runs; gRPC's
thread writes. The main thread sees two queues.
"""

import collections
import contextlib
import queue
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Final, Self, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from pagemill.v1 import worker_pb2, worker_pb2_grpc
from worker_svc.errors import InvariantError, RanksLostError
from worker_svc.service import wire
from worker_svc.service.plan_relay import PlanSender

CHANNEL_OPTIONS: Final = (
    # A reset admits every row in full: 1,024 rows of 32,768 tokens are 128 MiB.
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # A channel of its own for each dial, so that gRPC's own backoff does not add to ours.
    ("grpc.use_local_subchannel_pool", 1),
    # The link is internal, whatever proxy the environment names for the world outside.
    ("grpc.enable_http_proxy", 0),
    # A window for every plan but a reset, instead of one that grows by what pings find out: each
    # message would bring one, and its answer.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 4 << 20),
    # Heartbeats are never answered, so a dead peer shows as data nobody acknowledges. gRPC sets
    # the kernel's bound on that (TCP_USER_TIMEOUT) to the timeout of keepalive, where keepalive
    # is on; its pings are rarer than servers by default punish.
    ("grpc.keepalive_time_ms", 600_000),
    ("grpc.keepalive_timeout_ms", 20_000),
)

REFUSALS: Final = frozenset(
    {
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        # Somebody listens there who knows no workers.
        grpc.StatusCode.UNIMPLEMENTED,
    }
)
"""Ends of a stream after which joining again cannot help."""

OUTBOX_MESSAGES: Final = 64
"""Results (as many as plans may be in flight) and heartbeats that wait to be sent."""

SEND_DEADLINE_S: Final = 20.0
"""A full outbox for so long means that the peer no longer reads."""

CLOSE_DEADLINE_S: Final = 5.0
"""For the last messages to leave, and for threads to end."""


class StreamLostError(Exception):
    """The connection ended or never came to be: the environment's fault. Dial again."""


class RefusedError(Exception):
    """The scheduler will never take this worker."""


Incoming: TypeAlias = (
    wire.ReceivedPlan
    | worker_pb2.JoinAck
    | worker_pb2.Rendezvous
    | worker_pb2.AdapterChange
    | worker_pb2.StopWorker
)


class StepStream:
    """An open `Join` stream. Leaving its block closes it.

    A block left without an exception lets what was sent arrive first.
    """

    def __init__(self, address: str, hello: worker_pb2.WorkerHello) -> None:
        self._outbox: queue.Queue[worker_pb2.JoinRequest | None] = queue.Queue(OUTBOX_MESSAGES)
        # Plans are bounded by the pipeline's depth (`_decode`); the rest comes once each.
        self._inbox: queue.SimpleQueue[Incoming | Exception | None] = queue.SimpleQueue()
        self._num_received = 0
        self._num_answered = 0
        self._plan_sender: PlanSender | None = None
        self.over = threading.Event()
        """Set when the stream has ended: nothing comes any more."""
        self._pipeline_depth = 0  # until the acknowledgement says it: no plan may come before
        self._outbox.put_nowait(worker_pb2.JoinRequest(hello=hello))
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._call = worker_pb2_grpc.WorkerStub(self._channel).Join(self._requests())
        self._reader = threading.Thread(target=self._read, name="reader", daemon=True)

    def __enter__(self) -> Self:
        """Start reading."""
        self._reader.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the stream and end its threads."""
        # gRPC's thread is told to end; where the outbox is full, cancelling the call ends it.
        with contextlib.suppress(queue.Full):
            self._outbox.put(None, timeout=CLOSE_DEADLINE_S if kind is None else 0)
        if kind is None:
            self._reader.join(CLOSE_DEADLINE_S)
        self._call.cancel()
        self._channel.close()
        self._reader.join(CLOSE_DEADLINE_S)

    def receive(self, timeout_s: float | None) -> Incoming | None:
        """Return the next message, or None after `wake`.

        Raises: StreamLostError or RefusedError if the stream ended, or nothing came for
            `timeout_s`; RanksLostError if another rank is gone; InvariantError if what came
            breaks the protocol.
        """
        try:
            message = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            raise StreamLostError(f"nothing came for {timeout_s:g} s") from None
        if isinstance(message, Exception):
            raise message
        return message

    def wake(self) -> None:
        """Make `receive` return. From any thread."""
        self._inbox.put(None)

    def pass_plans_to(self, sender: PlanSender) -> None:
        """Pass plans on to the other ranks as they come. Called before there can be any."""
        self._plan_sender = sender

    def take_passed_plan(self, plan: bytes) -> None:
        """Take a plan that rank 0 passed on, as if it came on this stream. From any one thread."""
        try:
            self._inbox.put(self._decode_plan(worker_pb2.StepPlan.FromString(plan)))
        except (DecodeError, InvariantError) as error:
            self._inbox.put(error)

    def lose_ranks(self, error: RanksLostError) -> None:
        """Have `receive` raise it. From any thread."""
        self._inbox.put(error)

    def send_loaded(self, rendezvous_port: int) -> None:
        """Say that this rank can meet the others; rank 0, at which port."""
        loaded = worker_pb2.RankLoaded(rendezvous_port=rendezvous_port)
        self._send(worker_pb2.JoinRequest(loaded=loaded))

    def send_ready(self, ready: worker_pb2.WorkerReady) -> None:
        """Say that plans may come."""
        self._send(worker_pb2.JoinRequest(ready=ready))

    def send_result(self, result: worker_pb2.StepResult) -> None:
        """Answer a plan.

        Raises: StreamLostError if the peer no longer reads.
        """
        self.note_answered()
        self._send(worker_pb2.JoinRequest(result=result))

    def send_adapter_answer(self, answer: worker_pb2.AdapterAnswer) -> None:
        """Say how a load ended, if somebody reads it still. From any thread."""
        with contextlib.suppress(queue.Full):
            self._outbox.put(worker_pb2.JoinRequest(adapter=answer), timeout=SEND_DEADLINE_S)

    def note_answered(self) -> None:
        """Count a plan as answered: rank 0 does it for all."""
        self._num_answered += 1

    def send_failure(self, reason: str, *, permanent: bool) -> None:
        """Say why the worker cannot go on."""
        failure = worker_pb2.WorkerFailure(reason=reason, permanent=permanent)
        self._send(worker_pb2.JoinRequest(failure=failure))

    def send_heartbeat(self, heartbeat: worker_pb2.Heartbeat) -> None:
        """Say that the worker is alive, unless the outbox is full: a late one says nothing."""
        with contextlib.suppress(queue.Full):
            self._outbox.put_nowait(worker_pb2.JoinRequest(heartbeat=heartbeat))
        if self._plan_sender is not None:
            self._plan_sender.keep_alive()

    def _send(self, request: worker_pb2.JoinRequest) -> None:
        try:
            self._outbox.put(request, timeout=SEND_DEADLINE_S)
        except queue.Full:
            raise StreamLostError(f"nothing could be sent for {SEND_DEADLINE_S:g} s") from None

    def _requests(self) -> Iterator[worker_pb2.JoinRequest]:
        """Yield what is to be sent, to gRPC's thread, which waits as long as the stream lives."""
        while (request := self._outbox.get()) is not None:
            yield request

    def _read(self) -> None:
        """Read until the stream ends. Behind a message that breaks, the rest is not looked at."""
        try:
            for message in self._call:
                self._inbox.put(self._decode(message))
        except grpc.RpcError:
            pass
        except Exception as error:  # noqa: BLE001 the outermost frame: the main thread raises it
            self._inbox.put(error)
            with contextlib.suppress(grpc.RpcError):
                collections.deque(self._call, maxlen=0)
        self.over.set()
        self._inbox.put(self._end())

    def _end(self) -> StreamLostError | RefusedError:
        code, details = self._call.code(), self._call.details()
        if code in REFUSALS:
            return RefusedError(f"{code.name}: {details}")
        return StreamLostError(f"{code.name}: {details}" if details else code.name)

    def _decode(self, message: worker_pb2.JoinResponse) -> Incoming:
        match message.WhichOneof("message"):
            case "plan":
                if self._plan_sender is not None:
                    self._plan_sender.send(message.plan.SerializeToString())
                return self._decode_plan(message.plan)
            case "ack":
                self._pipeline_depth = message.ack.pipeline_depth
                return message.ack
            case "rendezvous":
                return message.rendezvous
            case "stop":
                return message.stop
            case "adapter":
                return message.adapter
            case _:
                raise InvariantError("an empty message came from the scheduler")

    def _decode_plan(self, plan: worker_pb2.StepPlan) -> wire.ReceivedPlan:
        arrived_ns = time.monotonic_ns()
        self._num_received += 1
        # A reset may come behind plans whose results nobody waits for any more.
        if self._num_received - self._num_answered > 2 * self._pipeline_depth:
            raise InvariantError(
                f"step {plan.step_id} came with {2 * self._pipeline_depth} plans "
                f"unanswered, where pipeline_depth is {self._pipeline_depth}"
            )
        return wire.ReceivedPlan(
            plan=wire.read_plan(plan),
            epoch=wire.read_epoch(plan),
            refusals=wire.read_refusals(plan),
            arrived_ns=arrived_ns,
            decode_ns=time.monotonic_ns() - arrived_ns,
        )
