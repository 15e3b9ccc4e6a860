"""An engine over a fake group, for tests of what the engine makes of plans and results."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from fake_group import FakeGroup
from scheduler_svc.core.kv_memory import KvMemory
from scheduler_svc.core.limits import Limits
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.service.engine import Engine
from scheduler_svc.service.engine_door import EngineDoor
from scheduler_svc.service.group_events import Mailbox
from scheduler_svc.service.kv_event_feed import KvEventFeed
from scheduler_svc.service.kv_watch import KvWatch
from scheduler_svc.service.step_record import StepRecord

BLOCK_SIZE = 4
NUM_BLOCKS = 64


class Bench:
    """An engine over a fake group. It observes the steps, and traces every other one."""

    def __init__(
        self,
        *,
        depth: int = 2,
        max_waiting: int = 64,
        worker_wait_s: float = 30.0,
        memory: KvMemory | None = None,
        feed: KvEventFeed | None = None,
        step_timeout_s: float = 30.0,
    ) -> None:
        limits = Limits(
            block_size=BLOCK_SIZE,
            max_num_seqs=4,
            max_num_batched_tokens=16,
            max_model_len=128,
            max_waiting_requests=max_waiting,
            pipeline_depth=depth,
        )
        self.records: list[StepRecord] = []
        self.memory = memory or KvMemory()
        self.scheduler = Scheduler(limits, memory=self.memory)
        mailbox = Mailbox()
        self.group = FakeGroup(mailbox, BLOCK_SIZE)
        self.engine = Engine(
            self.scheduler,
            self.group,
            mailbox,
            incarnation=5,
            worker_wait_s=worker_wait_s,
            step_timeout_s=step_timeout_s,
            tracer=self,
            after_turn=KvWatch(self.memory, mailbox.wake, feed=feed).turn,
        )
        self.door: EngineDoor = self.engine

    def traceparent(self, step_id: int) -> str:
        return f"trace-{step_id}" if step_id % 2 else ""

    def step(self, record: StepRecord) -> None:
        self.records.append(record)

    def holds_nothing(self) -> bool:
        pool = self.scheduler.pool
        return not self.scheduler.has_work and (pool is None or pool.num_used == 0)


@asynccontextmanager
async def running(bench: Bench, *, join: bool = True) -> AsyncIterator[Bench]:
    if join:
        bench.group.join(NUM_BLOCKS)
    loop = asyncio.create_task(bench.engine.run())
    try:
        yield bench
    finally:
        loop.cancel()
        with suppress(asyncio.CancelledError):
            await loop
