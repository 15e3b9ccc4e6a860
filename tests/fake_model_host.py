"""A model whose steps do what a test says, and a worker in a thread that serves it."""

import io
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from pagemill.v1 import worker_pb2
from scripted_scheduler import DEADLINE_S
from worker_svc.errors import AdapterError
from worker_svc.model.adapters import LoadedAdapter
from worker_svc.model.other_ranks import OtherRanks
from worker_svc.runtime.memory_budget import MemoryReport
from worker_svc.runtime.step_plan import StepPlan, StepResult, StepTiming
from worker_svc.service.exit_status import ExitStatus
from worker_svc.service.logs import make_logger
from worker_svc.service.model_host import CacheLimits, StepRunner
from worker_svc.service.shutdown import Shutdown
from worker_svc.service.worker import JoinSettings, Worker

Step = Callable[[StepPlan], None]


def at_once(plan: StepPlan) -> None:
    """Take no time for a step."""


class FakeRunner:
    """Samples 100 * step + row for each row the plan admits."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self.plans: list[StepPlan] = []
        self.threads: set[int] = set()

    def run(self, plan: StepPlan) -> StepResult:
        self.threads.add(threading.get_ident())
        self._step(plan)
        self.plans.append(plan)
        rows = np.array(sorted(row.row for row in plan.admitted), dtype=np.int32)
        return StepResult(
            step_id=plan.step_id,
            rows=rows,
            tokens=rows + np.int32(100 * plan.step_id),
            timing=StepTiming(prepare_ns=1, forward_ns=2, sample_ns=3, total_ns=10),
            row_errors=(),
        )


class FakeAdapters:
    """Reads whatever path is said to be there; notes what becomes of it."""

    def __init__(self) -> None:
        self.generations: dict[str, int] = {}
        """Of what lies under each path."""
        self.may_read = threading.Event()
        self.may_read.set()
        self.num_reads = 0
        self.loaded: dict[int, LoadedAdapter] = {}

    def read(self, path: str) -> LoadedAdapter:
        assert self.may_read.wait(DEADLINE_S)
        self.num_reads += 1
        if path == "bug":
            raise ZeroDivisionError("division by zero")
        if path not in self.generations:
            raise AdapterError(f"nothing is\nat {path}")
        return LoadedAdapter(self.generations[path], {})

    def publish(self, slot: int, adapter: LoadedAdapter) -> None:
        self.loaded[slot] = adapter

    def drop(self, slot: int) -> None:
        self.loaded.pop(slot, None)

    def generation(self, slot: int) -> int:
        return self.loaded[slot].generation if slot in self.loaded else 0


class FakeLaunchRunner:
    """Takes plans at once; the steps of a FakeRunner run when they are collected."""

    def __init__(self, step: Step, launched: Step) -> None:
        self._runner = FakeRunner(step)
        self._launched = launched

    def launch(self, plan: StepPlan) -> StepPlan:
        self._launched(plan)
        return plan

    def run(self, plan: StepPlan) -> StepResult:
        return self.collect(self.launch(plan))

    def collect(self, launched: StepPlan) -> StepResult:
        return self._runner.run(launched)


class FakeHost:
    """Counts what is asked of it. With `launched`, steps run beside the thread that takes plans."""

    def __init__(
        self,
        step: Step = at_once,
        load: Callable[[], None] = lambda: None,
        launched: Step | None = None,
    ) -> None:
        self.on_step = step
        self._launched = launched
        self._load = load
        self.more_devices: tuple[worker_pb2.Device, ...] = ()
        self.used: list[str] = []
        self.num_loads = 0
        self.num_agreements = 0
        self.ranks: OtherRanks | None = None
        self.limits: list[CacheLimits] = []
        self.runners: list[FakeRunner] = []
        self.model = worker_pb2.ModelFacts(
            fingerprint="ab" * 32,
            architecture="LlamaForCausalLM",
            vocab_size=272,
            dtype="float32",
            kv_dtype="float32",
            max_position_embeddings=512,
            kv_groups=[worker_pb2.KvGroup(num_layers=2, num_kv_heads=2, head_dim=16)],
        )
        self.device = worker_pb2.Device(kind="cpu", memory_bytes=1 << 30, name="a test")
        self.adapters = FakeAdapters()

    @property
    def devices(self) -> tuple[worker_pb2.Device, ...]:
        return (self.device, *self.more_devices)

    def use(self, uuid: str) -> None:
        self.used.append(uuid)

    def load(self, ranks: OtherRanks | None = None) -> None:
        self.ranks = ranks
        if self.num_loads == 0:
            self._load()
        self.num_loads += 1

    def agree(self) -> None:
        self.num_agreements += 1

    def make_runner(self, limits: CacheLimits) -> tuple[StepRunner, MemoryReport]:
        self.limits.append(limits)
        report = MemoryReport(
            weight_bytes=1 << 20,
            load_seconds=0.5,
            num_blocks=limits.num_blocks_override or 32,
            block_size=limits.block_size,
            block_bytes=4096,
            max_model_len=limits.max_model_len,
            blocks_per_request=-(-limits.max_model_len // limits.block_size),
        )
        if self._launched is not None:
            return FakeLaunchRunner(self.on_step, self._launched), report
        # Looked up anew for each step: a test may change it.
        self.runners.append(FakeRunner(lambda plan: self.on_step(plan)))
        return self.runners[-1], report


@dataclass
class RunningWorker:
    """A worker in a thread of the test."""

    shutdown: Shutdown
    log: io.StringIO
    exited: Future[None] = field(default_factory=Future)
    """Done when the worker asks for the process to end at once."""

    status: Future[ExitStatus] = field(default_factory=Future)
    """How `Worker.run` ended."""

    def ends_with(self) -> ExitStatus:
        """Wait for the end."""
        return self.status.result(DEADLINE_S)


@contextmanager
def running_worker(
    host: FakeHost, address: str, secret: str = "", timeout_s: float = 0.0
) -> Iterator[RunningWorker]:
    """Run a worker until the block is left."""
    running = RunningWorker(Shutdown(), io.StringIO())
    worker = Worker(
        host,
        JoinSettings(address, secret, timeout_s),
        running.shutdown,
        make_logger(running.log, "json", "debug"),
        exit_now=lambda: running.exited.set_result(None),
    )

    def run() -> None:
        try:
            running.status.set_result(worker.run())
        except BaseException as error:  # noqa: BLE001 the test that waits raises it
            running.status.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield running
    finally:
        running.shutdown.ask()
        thread.join(DEADLINE_S)
    assert not thread.is_alive()
