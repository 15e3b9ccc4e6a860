"""A worker group without a wire: it answers each plan when a test says so, or at once."""

import asyncio
import time
from collections import deque

import numpy as np

from fake_worker import FakeWorker
from scheduler_svc.core.block_hash import BlockHash
from scheduler_svc.core.step_plan import StepPlan, StepResult
from scheduler_svc.service.group_events import GroupLost, GroupReady, Mailbox, StepArrived
from scheduler_svc.service.server_state import GroupState
from scheduler_svc.service.worker_link import SentPlan
from scheduler_svc.service.worker_wire import Epoch, StepAnswer, WorkerTiming


class FakeGroup:
    """Keeps sent plans until `answer`, or answers them as they come (`eager`)."""

    def __init__(self, mailbox: Mailbox, block_size: int, *, eager: bool = True) -> None:
        self.plans: deque[StepPlan] = deque()
        self.dropped: list[str] = []
        self.traceparents: list[str] = []
        self.eager = eager
        self.execute_ns = 10
        self.worker = FakeWorker(block_size, 0)
        self._block_size = block_size
        self._mailbox = mailbox
        self._epoch_number = 0

    def join(self, num_blocks: int, *, kept_cache: bool = False) -> None:
        """Become ready, with an empty cache or the one it had."""
        if not kept_cache:
            self.worker = FakeWorker(self._block_size, num_blocks)
        self._epoch_number += 1
        self.plans.clear()
        self._mailbox.post(
            GroupReady(self._epoch_number, num_blocks, BlockHash(b"root"), kept_cache)
        )

    def leave(self) -> None:
        """Lose the connection, with the plans that are under way."""
        self.plans.clear()
        self._mailbox.post(GroupLost("it left"))

    def send(self, plan: StepPlan, traceparent: str) -> SentPlan:
        self.traceparents.append(traceparent)
        self.plans.append(plan)
        if self.eager:
            asyncio.get_running_loop().call_soon(self.answer)
        return SentPlan(self._epoch_number, 100, time.monotonic_ns(), time.monotonic_ns())

    def answer(self) -> None:
        """Run the oldest plan."""
        if self.plans:
            self.give(self.worker.run(self.plans.popleft()))

    def give(self, result: StepResult) -> None:
        """Answer with a result of the test's own making."""
        answer = StepAnswer(
            Epoch(1, self._epoch_number), result, WorkerTiming(1, 2, 3, 4, self.execute_ns, 5)
        )
        now_ns = time.monotonic_ns()
        self._mailbox.post(StepArrived(answer, 50, now_ns, time.monotonic_ns()))

    def drop_worker(self, reason: str) -> None:
        self.dropped.append(reason)
        self.leave()

    def state(self) -> GroupState:
        return GroupState(0, self._epoch_number > 0, self._epoch_number, 0, (), "")


def no_tokens(step_id: int) -> StepResult:
    """Return a result in which nobody sampled."""
    return StepResult(step_id, np.zeros(0, dtype=np.int32))
