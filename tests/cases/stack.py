"""The whole product in one process: the real server, a real worker and a client, over real gRPC.

The server is the one that `pagemill scheduler` runs, the worker the one of `pagemill worker`, but
in a thread; so a test can look at the scheduler's state, and at every step as the worker met it.
"""

import asyncio
import io
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from prometheus_client import CollectorRegistry

from pagemill.client import AsyncClient, Load
from pagemill.v1 import worker_pb2
from scheduler_svc.config import SchedulerSettings
from scheduler_svc.core.free_block_queue import BlockId
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.service import server
from scheduler_svc.service.engine import Engine
from scheduler_svc.service.listener import Listener
from scheduler_svc.service.metrics import LoadCollector
from scheduler_svc.service.tracing import Tracing
from worker_svc.model.other_ranks import OtherRanks
from worker_svc.runtime.memory_budget import MemoryReport
from worker_svc.runtime.model_runner import ModelRunner
from worker_svc.runtime.step_plan import StepPlan, StepResult
from worker_svc.service.exit_status import ExitStatus
from worker_svc.service.local_adapters import AdapterSettings
from worker_svc.service.local_model import LocalModel, LocalSettings
from worker_svc.service.logs import make_logger
from worker_svc.service.model_host import CacheLimits
from worker_svc.service.shutdown import Shutdown
from worker_svc.service.worker import JoinSettings, Worker

NUM_BLOCKS = 64
WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class RanRow:
    """One row of a step as the worker ran it."""

    request_id: str
    index: int
    """Of the sequence."""
    num_computed: int
    num_new: int
    num_tokens: int
    blocks: tuple[int, ...]
    sampled: bool

    @property
    def end(self) -> int:
        """Tokens computed behind this step."""
        return self.num_computed + self.num_new


Step = tuple[RanRow, ...]


class RecordingRunner:
    """A model runner that notes every step, and takes as long for one as a test says."""

    def __init__(self, runner: ModelRunner, steps: list[Step], host: "RecordingHost") -> None:
        self._runner, self._steps, self._host = runner, steps, host
        self._names: dict[int, tuple[str, int]] = {}

    def run(self, plan: StepPlan) -> StepResult:
        if self._host.step_s:
            time.sleep(self._host.step_s)
        assert self._host.may_step.wait(WAIT_S)
        parents = {fork.row: self._names[fork.parent_row][0] for fork in plan.forked}
        for fork in plan.forked:
            self._names[fork.row] = (parents[fork.row], fork.sequence_index)
        for row in plan.admitted:
            self._names[row.row] = (row.request_id, row.sequence_index)
        result = self._runner.run(plan)
        self._host.plans.append(plan)
        self._steps.append(self._note(result))
        return result

    def _note(self, result: StepResult) -> Step:
        rows = self._runner.rows
        sampled = set(result.rows.tolist())
        (tables,) = rows.block_tables
        return tuple(
            RanRow(
                *self._names[row],
                int(rows.num_computed_tokens[row]),
                int(rows.num_new_tokens[row]),
                int(rows.num_tokens[row]) - (row in sampled),
                tuple(tables.ids[row, : tables.num_blocks[row]].tolist()),
                row in sampled,
            )
            for row in np.flatnonzero(rows.num_new_tokens).tolist()
        )


class RecordingHost:
    """The model of a path on this CPU. What its cache never wrote is NaN."""

    def __init__(
        self,
        path: Path,
        num_blocks: int | None,
        step_s: float,
        adapter_dir: str = "",
        kv_cache_dtype: str = "auto",
        *,
        calculate_kv_scales: bool = True,
    ) -> None:
        self.log = io.StringIO()
        log = make_logger(self.log, "text", "warning")
        self._model = LocalModel(
            LocalSettings(
                model_path=str(path),
                device="cpu",
                dtype="float32",
                kv_cache_dtype=kv_cache_dtype,
                calculate_kv_scales=calculate_kv_scales,
                attention_backend="auto",
                kv_cache_memory_bytes=None,
                gpu_memory_utilization=0.9,
                num_gpu_blocks_override=num_blocks,
                adapters=AdapterSettings(adapter_dir),
            ),
            log,
        )
        self.model, self.device = self._model.model, self._model.device
        self.adapters = self._model.adapters
        self.steps: list[Step] = []
        self.plans: list[StepPlan] = []
        self.step_s = step_s
        self.may_step = threading.Event()
        self.may_step.set()

    @property
    def devices(self) -> Sequence[worker_pb2.Device]:
        return self._model.devices

    def use(self, uuid: str) -> None:
        self._model.use(uuid)

    def load(self, ranks: OtherRanks | None = None) -> None:
        self._model.load(ranks)

    def agree(self) -> None:
        self._model.agree()

    def make_runner(self, limits: CacheLimits) -> tuple[RecordingRunner, MemoryReport]:
        runner, report = self._model.make_runner(limits)
        assert isinstance(runner, ModelRunner)
        for layer in runner.kv_cache.layers:
            for cache in layer[:2]:
                cache.fill_(float("nan"))
        return RecordingRunner(runner, self.steps, self), report


@dataclass
class RunningWorker:
    """A worker in a thread."""

    host: RecordingHost
    shutdown: Shutdown
    thread: threading.Thread
    log: io.StringIO
    status: list[ExitStatus]

    def stop(self) -> None:
        """Ask it to leave, and wait until it has."""
        self.shutdown.ask()
        self.host.may_step.set()
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()


def start_worker(host: RecordingHost, address: str) -> RunningWorker:
    """Run a worker in a thread until it is stopped or ends."""
    log, shutdown, status = io.StringIO(), Shutdown(), list[ExitStatus]()
    worker = Worker(
        host,
        JoinSettings(address, "", 0.0),
        shutdown,
        make_logger(log, "text", "info"),
        exit_now=lambda: None,
    )
    thread = threading.Thread(target=lambda: status.append(worker.run()), daemon=True)
    thread.start()
    return RunningWorker(host, shutdown, thread, log, status)


@dataclass
class Stack:
    """A server with its worker and a client of it."""

    model: Path
    engine: Engine
    client: AsyncClient
    address: str
    worker_address: str
    registry: CollectorRegistry
    task: "asyncio.Task[None]"
    stop: asyncio.Event
    workers: list[RunningWorker] = field(default_factory=list)
    adapter_dir: str = ""
    """Of the workers. Empty: they load none."""
    kv_cache_dtype: str = "auto"
    """Of the workers."""
    calculate_kv_scales: bool = True
    """Of the workers."""

    @property
    def scheduler(self) -> Scheduler:
        return self.engine._scheduler

    @property
    def steps(self) -> list[Step]:
        """What the latest worker has run."""
        return self.workers[-1].host.steps

    async def add_worker(
        self, *, num_blocks: int | None = None, step_s: float = 0.0, model: Path | None = None
    ) -> RunningWorker:
        """Start a worker and wait until it serves."""
        host = RecordingHost(
            model or self.model,
            num_blocks,
            step_s,
            self.adapter_dir,
            self.kv_cache_dtype,
            calculate_kv_scales=self.calculate_kv_scales,
        )
        self.workers.append(start_worker(host, self.worker_address))
        await until(lambda: bool(self.engine.serving))
        return self.workers[-1]

    async def stop_worker(self) -> None:
        """Stop the latest worker and wait until the server has noticed."""
        await asyncio.to_thread(self.workers[-1].stop)
        await until(lambda: not self.engine.serving)

    def metric(self, name: str, **labels: str) -> float:
        """Return a metric's value; 0 if nothing was counted yet."""
        return self.registry.get_sample_value(name, labels) or 0.0

    async def idle(self, within_s: float = WAIT_S) -> Load:
        """Wait until nothing is live; prove that nothing is held, and return the load."""
        await until(lambda: not self.scheduler.has_work and self.engine.num_live == 0, within_s)
        await until(lambda: self.scheduler.num_in_flight == 0)
        self.scheduler.check()
        pool, state = self.scheduler.pool, self.scheduler._state
        assert pool is not None
        assert (self.scheduler.num_running, self.scheduler.num_waiting) == (0, 0)
        assert (pool.num_used, pool.num_free) == (0, pool.num_blocks)
        assert all(pool.num_users(BlockId(block)) == 0 for block in range(1, pool.num_blocks + 1))
        assert not any((state.live, state.families, state.beams, state.pending_forks))
        assert not any((self.engine._live.streams, self.engine._live.piles))
        load = await self.client.load()
        assert (load.running, load.waiting, load.used_blocks) == (0, 0, 0)
        assert self.metric("pagemill_blocks", state="used") == 0.0
        return load


@asynccontextmanager
async def serving(
    model: Path,
    *,
    num_blocks: int | None = NUM_BLOCKS,
    step_s: float = 0.0,
    join: bool = True,
    traces: Tracing | None = None,
    adapter_dir: Path | None = None,
    kv_cache_dtype: str = "auto",
    calculate_kv_scales: bool = True,
    **settings: object,
) -> AsyncIterator[Stack]:
    """Serve a model with blocks of 4 until the block is left. `step_s`: seconds a step takes."""
    given = SchedulerSettings(
        **{  # type: ignore[arg-type]  # any setting
            "model_path": str(model),
            "served_model_name": ["case"],
            "listen": "127.0.0.1:0",
            "worker_listen": "127.0.0.1:0",
            "block_size": 4,
            "num_gpu_blocks_override": num_blocks,
            "drain_timeout": 0.0,
            **settings,
        }
    )
    public, workers = Listener.bind("listen", given.listen), Listener.bind("w", given.worker_listen)
    registry, stop = CollectorRegistry(), asyncio.Event()
    parts = server._build(given, "0.0.0", registry, traces)
    registry.register(LoadCollector(parts.engine.load))
    announced: list[str] = []
    task = asyncio.create_task(
        server._serve(parts, public, workers, given.drain_timeout, stop, announced.append)
    )
    client = AsyncClient(public.address)
    stack = Stack(
        model, parts.engine, client, public.address, workers.address, registry, task, stop
    )
    stack.adapter_dir, stack.kv_cache_dtype = str(adapter_dir or ""), kv_cache_dtype
    stack.calculate_kv_scales = calculate_kv_scales
    try:
        async with client:
            await until(lambda: len(announced) == 2 or task.done())
            if join:
                await stack.add_worker(step_s=step_s)
            yield stack
    finally:
        for worker in stack.workers:
            worker.host.may_step.set()
        stop.set()
        try:
            await task
        finally:
            for worker in stack.workers:
                await asyncio.to_thread(worker.stop)


async def until(condition: Callable[[], bool], within_s: float = WAIT_S) -> None:
    """Wait until something is so; fail when it takes too long."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.002)


@contextmanager
def held(stack: Stack) -> Iterator[None]:
    """Keep the latest worker before its next step while the block lasts."""
    gate = stack.workers[-1].host.may_step
    gate.clear()
    try:
        yield
    finally:
        gate.set()
