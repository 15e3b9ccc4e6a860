"""A worker process without a model: it dials in over real gRPC and runs plans on a fake cache."""

import asyncio
import copy
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import grpc
from grpc import aio

from fake_worker import FakeWorker
from pagemill.v1 import worker_pb2, worker_pb2_grpc
from scheduler_svc.core.step_plan import StepPlan, StepResult
from wire_plans import decode_plan


def model_facts(*, fingerprint: str = "f00d", vocab_size: int = 3) -> worker_pb2.ModelFacts:
    return worker_pb2.ModelFacts(
        fingerprint=fingerprint,
        architecture="LlamaForCausalLM",
        vocab_size=vocab_size,
        kv_dtype="float32",
        max_position_embeddings=128,
        kv_groups=[worker_pb2.KvGroup(num_layers=2, num_kv_heads=2, head_dim=8)],
        dtype="float32",
    )


def hello(boot_id: int = 1, **changes: object) -> worker_pb2.WorkerHello:
    """Return a hello that is let in, but for the changes."""
    message = worker_pb2.WorkerHello(
        protocol_version=1,
        boot_id=boot_id,
        devices=[worker_pb2.Device(kind="cpu", uuid=f"{boot_id:x}", name="a CPU")],
        model=model_facts(),
    )
    changed = worker_pb2.WorkerHello(**changes)  # type: ignore[arg-type]  # any field
    if changed.model.kv_groups:
        del message.model.kv_groups[:]
    message.MergeFrom(changed)
    return message


class WireWorker(FakeWorker):
    """Counts rows and tokens itself, since they do not travel."""

    def run(self, plan: StepPlan, failing: frozenset[int] = frozenset()) -> StepResult:
        rows = copy.deepcopy(self.rows)
        probe = FakeWorker(self.block_size, self.num_blocks, self.groups)
        probe.rows, probe.next_step_id = rows, self.next_step_id
        probe._follow(plan)
        counts = [row.num_new for row in probe.rows.values() if row.num_new]
        whole = replace(plan, num_rows=len(counts), num_tokens=sum(counts))
        return super().run(whole, failing)


class Connection:
    """A joined worker's stream."""

    def __init__(
        self,
        call: "aio.StreamStreamCall[worker_pb2.JoinRequest, worker_pb2.JoinResponse]",
        ack: worker_pb2.JoinAck,
    ) -> None:
        self.ack = ack
        self.stopped = False
        self.on_stop: Callable[[], None] = lambda: None
        self._silent = False
        self.gate = asyncio.Event()
        """Plans are answered while it is set."""
        self.gate.set()
        self.execute_ns = 9
        """What each step says it took."""
        self.plans: list[worker_pb2.StepPlan] = []
        self.num_heartbeats = 0
        self.changes: list[tuple[int, worker_pb2.AdapterChange]] = []
        """Of adapters, each with the number of plans that came before."""
        self._to_do: asyncio.Queue[worker_pb2.StepPlan] = asyncio.Queue()
        self._call = call
        self._writing = asyncio.Lock()

    async def send(self, **message: object) -> None:
        request = worker_pb2.JoinRequest(**message)  # type: ignore[arg-type]  # any kind
        async with self._writing:
            await _write(self._call, request)

    async def ready(self, num_blocks: int) -> None:
        await self.send(ready=worker_pb2.WorkerReady(num_blocks=num_blocks, block_bytes=1))

    async def meet(self, port: int = 0) -> str:
        """Say that this rank has loaded, and return where the group meets."""
        await self.say_loaded(port)
        async with asyncio.timeout(10):
            message = await self._call.read()
        assert isinstance(message, worker_pb2.JoinResponse)
        assert message.WhichOneof("message") == "rendezvous", message
        return message.rendezvous.address

    async def say_loaded(self, port: int) -> None:
        await self.send(loaded=worker_pb2.RankLoaded(rendezvous_port=port))

    def drop(self) -> None:
        """Break the connection."""
        self._call.cancel()

    def fall_silent(self) -> None:
        """Send no more heartbeats."""
        self._silent = True

    async def heartbeats(self) -> None:
        """Send heartbeats until cancelled."""
        while not self._silent:
            await self.send(heartbeat=worker_pb2.Heartbeat(phase=worker_pb2.WORKER_PHASE_IDLE))
            self.num_heartbeats += 1
            await asyncio.sleep(self.ack.heartbeat_s)

    async def listen(self) -> None:
        """Note plans until a stop, or until the stream ends. Its status comes behind them all."""
        while isinstance(message := await self._call.read(), worker_pb2.JoinResponse):
            if message.HasField("stop"):
                self.stopped = True
                self.on_stop()
                await self._call.done_writing()
                return
            if message.HasField("adapter"):
                self.changes.append((len(self.plans), message.adapter))
                continue
            self.plans.append(message.plan)
            self._to_do.put_nowait(message.plan)

    async def work(self, worker: FakeWorker) -> None:
        """Run plans in order while the gate is open."""
        while True:
            plan = await self._to_do.get()
            await self.gate.wait()
            await self.send(
                result=wire_result(worker.run(decode_plan(plan)), plan.epoch, self.execute_ns)
            )

    async def status(self) -> tuple[grpc.StatusCode, str]:
        """Wait for the end of the stream, and return why it ended."""
        async with asyncio.timeout(10):
            return await self._call.code(), await self._call.details()


async def _write(call: Any, request: worker_pb2.JoinRequest) -> None:
    """Write as `call.write` does, but that the stream keeps the status which the server gave it.

    Of a write that meets the end of the stream gRPC makes an INTERNAL of its own instead.
    """
    if call.done():
        await call.write(request)
    try:
        await call._cython_call.send_serialized_message(request.SerializeToString())
    except aio.InternalError:
        await call._raise_for_status()


def wire_result(
    result: StepResult, epoch: worker_pb2.Epoch, execute_ns: int = 9
) -> worker_pb2.StepResult:
    return worker_pb2.StepResult(
        step_id=result.step_id,
        epoch=epoch,
        tokens=result.tokens.astype("<i4").tobytes(),
        errors=[worker_pb2.RowError(row=row, reason=reason) for row, reason in result.row_errors],
        timing=worker_pb2.StepTiming(wait_ns=1, prepare_ns=2, forward_ns=3, execute_ns=execute_ns),
    )


@asynccontextmanager
async def dialled(
    address: str, greeting: worker_pb2.WorkerHello | None = None
) -> AsyncIterator[Connection]:
    """Join with a hello. Leaving the block drops the connection, as a broken network would.

    Raises: aio.AioRpcError if the scheduler refuses.
    """
    async with aio.insecure_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        call = stub.Join()
        await call.write(worker_pb2.JoinRequest(hello=greeting or hello()))
        async with asyncio.timeout(10):
            first = await call.read()
        if not isinstance(first, worker_pb2.JoinResponse):
            raise AssertionError(f"no ack: {await call.code()}, {await call.details()}")
        try:
            yield Connection(call, first.ack)
        finally:
            call.cancel()


@asynccontextmanager
async def working(
    address: str, worker: FakeWorker, greeting: worker_pb2.WorkerHello | None = None
) -> AsyncIterator[Connection]:
    """Join, be ready, send heartbeats and answer plans while the block lasts."""
    async with dialled(address, greeting) as connection:
        await connection.ready(worker.num_blocks)
        tasks = [
            asyncio.create_task(connection.heartbeats()),
            asyncio.create_task(connection.listen()),
            asyncio.create_task(connection.work(worker)),
        ]
        try:
            yield connection
        finally:
            for task in tasks:
                task.cancel()
                with suppress(asyncio.CancelledError, aio.AioRpcError, asyncio.InvalidStateError):
                    await task


async def refusal(address: str, greeting: worker_pb2.WorkerHello) -> tuple[grpc.StatusCode, str]:
    """Return how a hello is refused."""
    async with aio.insecure_channel(address) as channel:
        call = worker_pb2_grpc.WorkerStub(channel).Join()
        await call.write(worker_pb2.JoinRequest(hello=greeting))
        async with asyncio.timeout(10):
            return await call.code(), await call.details()
