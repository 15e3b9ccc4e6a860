"""A scheduler of small numbers and a fake worker, with a wire and a clock that a test moves."""

from array import array
from collections import deque
from dataclasses import dataclass, field

from fake_worker import FakeWorker
from scheduler_svc.core.beam_options import BeamOptions
from scheduler_svc.core.block_hash import BlockHash, ExtraKeys
from scheduler_svc.core.kv_groups import FULL_ATTENTION, KvGroup
from scheduler_svc.core.limits import Limits
from scheduler_svc.core.reports import Reports
from scheduler_svc.core.request import Request, Sampling, Stopping
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step_plan import StepOutcome, StepPlan, StepResult
from scheduler_svc.core.victims import VICTIM_POLICIES
from scheduler_svc.core.waiting_queue import waiting_queue

BLOCK_SIZE = 4
ROOT = BlockHash(b"root")


def limits(
    budget: int = 64,
    rows: int = 4,
    depth: int = 1,
    length: int = 64,
    waiting: int = 64,
    block_size: int = BLOCK_SIZE,
    **more: int,
) -> Limits:
    return Limits(block_size, rows, budget, length, waiting, depth, **more)


def request(
    name: str,
    prompt: list[int],
    max_output: int | None = 4,
    *,
    stop: frozenset[int] = frozenset(),
    salt: bytes = b"",
    priority: int = 0,
    tenant: str = "",
    weight: float = 1.0,
    arrival_ns: int = 0,
    n: int = 1,
    read_cache: bool = True,
    beam: BeamOptions | None = None,
    reports: Reports | None = None,
) -> Request:
    return Request(
        name,
        array("i", prompt),
        Sampling(0.0),
        Stopping(max_output, eos_token_ids=stop),
        extra=ExtraKeys(salt),
        priority=priority,
        tenant=tenant,
        weight=weight,
        arrival_ns=arrival_ns,
        num_sequences=n,
        read_cache=read_cache,
        beam=beam,
        reports=reports,
    )


@dataclass
class Bench:
    """A scheduler and a fake worker, with the wire between them."""

    scheduler: Scheduler
    num_blocks: int
    groups: tuple[KvGroup, ...] = FULL_ATTENTION
    worker: FakeWorker = field(init=False)
    wire: deque[tuple[StepPlan, StepResult]] = field(default_factory=deque)
    now_ns: int = 0

    def __post_init__(self) -> None:
        self.join()

    def join(self) -> list[Request]:
        """Let a worker with an empty cache join; return the requests that fit it no more."""
        self.wire.clear()
        size = self.scheduler.limits.block_size
        self.worker = FakeWorker(size, self.num_blocks, self.groups)
        return self.scheduler.start_epoch(self.num_blocks, ROOT, self.now_ns, self.groups)

    def plan(self, failing: frozenset[int] = frozenset()) -> StepPlan | None:
        self.now_ns += 1
        plan = self.scheduler.schedule(self.now_ns)
        self.scheduler.check()
        if plan is not None:
            assert 1 <= plan.num_tokens <= self.scheduler.limits.max_num_batched_tokens
            self.wire.append((plan, self.worker.run(plan, failing)))
        return plan

    def answer(self) -> StepOutcome:
        self.now_ns += 1
        outcome = self.scheduler.apply(self.wire.popleft()[1], self.now_ns)
        self.scheduler.check()
        return outcome

    def turn(self, failing: frozenset[int] = frozenset()) -> StepOutcome | None:
        """Plan as far ahead as allowed, then take one answer."""
        while self.plan(failing) is not None:
            pass
        return self.answer() if self.wire else None

    def lose_worker(self, *, same_process: bool) -> None:
        """Lose the connection, and have the same worker back or one with an empty cache."""
        self.scheduler.lose_worker(self.now_ns)
        self.scheduler.check()
        self.wire.clear()
        if same_process:
            self.scheduler.rejoin(self.now_ns)
        else:
            assert self.join() == []
        self.scheduler.check()

    def run(self) -> None:
        while self.scheduler.has_work:
            self.turn()
        while self.wire:
            self.answer()

    def send(self, *requests: Request) -> None:
        for each in requests:
            self.scheduler.add(each, self.now_ns)


def bench(
    num_blocks: int = 32,
    policy: str = "fcfs",
    victim: str = "cheapest",
    **limit: int,
) -> Bench:
    scheduler = Scheduler(
        limits(**limit),
        waiting=waiting_queue(policy),
        choose_victim=VICTIM_POLICIES[victim],
    )
    return Bench(scheduler, num_blocks)


def grouped_bench(groups: tuple[KvGroup, ...], num_blocks: int, **limit: int) -> Bench:
    return Bench(Scheduler(limits(**limit)), num_blocks, groups)
