"""A scheduler that says what a test tells it, over a real listener, and remembers what it hears."""

import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import grpc

from pagemill.v1 import worker_pb2, worker_pb2_grpc

DEADLINE_S = 30.0
"""For anything that must happen at all; long, since the machine may be busy."""


def ack(**changes: Any) -> worker_pb2.JoinAck:
    """Return an acknowledgement of the usual settings; the device is filled in on sending."""
    settings: dict[str, Any] = {
        "world_size": 1,
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 64,
        "pipeline_depth": 2,
        "heartbeat_s": 0.02,
    }
    return worker_pb2.JoinAck(**(settings | changes))


def plan(step_id: int, **changes: Any) -> worker_pb2.StepPlan:
    """Return a plan of epoch 1, a reset if it is the first."""
    settings: dict[str, Any] = {
        "epoch": worker_pb2.Epoch(incarnation=7, number=1),
        "reset": step_id == 0,
    }
    return worker_pb2.StepPlan(step_id=step_id, **(settings | changes))


def admitted(row: int, **changes: object) -> worker_pb2.AdmittedRow:
    """Return a row of one token, to be run."""
    tokens = (1).to_bytes(4, "little")
    return worker_pb2.AdmittedRow(
        row=row,
        request_id=f"r{row}",
        tokens=tokens,
        num_prompt_tokens=1,
        num_new_tokens=1,
        block_tables=[tokens],
        **changes,  # type: ignore[arg-type]
    )


class Connection:
    """One `Join` call, from the scheduler's side."""

    def __init__(self, requests: Iterator[worker_pb2.JoinRequest], *, reads: bool) -> None:
        self._say: queue.SimpleQueue[worker_pb2.JoinResponse | grpc.StatusCode] = (
            queue.SimpleQueue()
        )
        self._heard: queue.SimpleQueue[worker_pb2.JoinRequest | None] = queue.SimpleQueue()
        self._requests = requests
        self.heartbeats: list[worker_pb2.Heartbeat] = []
        if reads:
            threading.Thread(target=self._hear, daemon=True).start()

    def hear(self, kind: str) -> Any:
        """Return the next message but heartbeats, which must be of this kind."""
        request = self._heard.get(timeout=DEADLINE_S)
        assert request is not None, f"the worker closed the stream where it owed {kind}"
        assert request.WhichOneof("message") == kind, request
        return getattr(request, kind)

    def hear_end(self) -> None:
        """Wait until the worker closes the stream, having said nothing more."""
        request = self._heard.get(timeout=DEADLINE_S)
        assert request is None, request

    def hear_heartbeat(self, phase: worker_pb2.WorkerPhase.ValueType) -> worker_pb2.Heartbeat:
        """Wait for a new heartbeat of a phase."""
        seen, deadline = len(self.heartbeats), time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            for heartbeat in self.heartbeats[seen:]:
                if heartbeat.phase == phase:
                    return heartbeat
            time.sleep(0.001)
        raise AssertionError(f"no heartbeat of {phase} came; {self.heartbeats[-3:]}")

    def acknowledge(self, **changes: Any) -> worker_pb2.WorkerHello:
        """Answer the hello, and return it."""
        hello: worker_pb2.WorkerHello = self.hear("hello")
        self.acknowledge_hello(hello, **changes)
        return hello

    def acknowledge_hello(self, hello: worker_pb2.WorkerHello, **changes: Any) -> None:
        """Give a worker its place."""
        message = ack(**({"device_uuid": hello.devices[0].uuid} | changes))
        self._say.put(worker_pb2.JoinResponse(ack=message))

    def take(self, **changes: Any) -> worker_pb2.WorkerHello:
        """Answer the hello, wait until the worker is ready, and return the hello."""
        hello = self.acknowledge(**changes)
        self.hear("ready")
        return hello

    def rendezvous(self, address: str) -> None:
        """Say where the ranks meet."""
        message = worker_pb2.Rendezvous(address=address)
        self._say.put(worker_pb2.JoinResponse(rendezvous=message))

    def plan(self, step_id: int, **changes: Any) -> None:
        """Send a plan."""
        self._say.put(worker_pb2.JoinResponse(plan=plan(step_id, **changes)))

    def adapter(self, **change: Any) -> None:
        """Send a change of an adapter."""
        self._say.put(worker_pb2.JoinResponse(adapter=worker_pb2.AdapterChange(**change)))

    def stop(self) -> None:
        """Send a stop."""
        self._say.put(worker_pb2.JoinResponse(stop=worker_pb2.StopWorker()))

    def end(self, code: grpc.StatusCode) -> None:
        """End the stream with a status."""
        self._say.put(code)

    def responses(self, context: Any) -> Iterator[worker_pb2.JoinResponse]:
        """Yield what is to be said, until the worker closes the stream or `end` was called."""
        while not isinstance(message := self._say.get(), grpc.StatusCode):
            yield message
        if message is not grpc.StatusCode.OK:
            context.abort(message, "as the test says")

    def _hear(self) -> None:
        try:
            for request in self._requests:
                if request.WhichOneof("message") == "heartbeat":
                    self.heartbeats.append(request.heartbeat)
                else:
                    self._heard.put(request)
        except grpc.RpcError:  # the stream ended from the other side
            pass
        self._heard.put(None)
        self.end(grpc.StatusCode.OK)


class ScriptedScheduler(worker_pb2_grpc.WorkerServicer):
    """A listener at which workers join. Leaving its block closes it."""

    def __init__(self, address: str = "127.0.0.1:0", *, reads: bool = True) -> None:
        self._connections: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        self._reads = reads
        self._server = grpc.server(ThreadPoolExecutor(max_workers=4))
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(address)
        self.address = f"127.0.0.1:{port}" if address.startswith("127.") else address

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.stop(grace=None).wait(DEADLINE_S)

    def accept(self) -> Connection:
        """Return the next worker's stream."""
        return self._connections.get(timeout=DEADLINE_S)

    def Join(
        self, request_iterator: Iterator[worker_pb2.JoinRequest], context: Any
    ) -> Iterator[worker_pb2.JoinResponse]:
        connection = Connection(request_iterator, reads=self._reads)
        context.add_callback(lambda: connection.end(grpc.StatusCode.OK))
        self._connections.put(connection)
        yield from connection.responses(context)
