"""A load with deadlines through the real core in virtual time, beside what would be refused.

Nobody is refused: that a request would be is noted, and then it is queued all the same. So the
run itself tells whether it would have been served in time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from fake_worker import FakeWorker
from scheduler_bench import ROOT
from scheduler_svc.core.errors import HopelessDeadlineError, InvalidRequestError, QueueFullError
from scheduler_svc.core.request import FinishReason, Request
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step_pace import StepPace
from scheduler_svc.core.step_plan import StepResult

FIXED_NS, TOKEN_NS = 1_000_000, 100_000


@dataclass
class DeadlineRun:
    """One run. Steps take a fixed time, and some for each token; `slow_steps` take tenfold."""

    scheduler: Scheduler
    num_blocks: int
    slow_steps: frozenset[int] = frozenset()
    pace: StepPace = field(default_factory=StepPace)
    hopeless: list[Request] = field(default_factory=list)
    now_ns: int = 0

    def run(self, load: Sequence[Request]) -> None:
        """Take requests in order of arrival, to the last one's end."""
        worker = FakeWorker(self.scheduler.limits.block_size, self.num_blocks)
        self.scheduler.start_epoch(self.num_blocks, ROOT, 0)
        coming, live = list(load), list[Request]()
        flying: list[tuple[int, int, int, StepResult]] = []
        num_steps = 0
        while coming or self.scheduler.has_work:
            while coming and coming[0].arrival_ns <= self.now_ns:
                live += self._add(coming.pop(0))
            for request in live:
                if request.deadline_ns is not None and request.deadline_ns <= self.now_ns:
                    self.scheduler.abort(request, self.now_ns)
            while (plan := self.scheduler.schedule(self.now_ns)) is not None:
                factor = 10 if num_steps in self.slow_steps else 1
                execute_ns = factor * (FIXED_NS + TOKEN_NS * plan.num_tokens)
                begin_ns = max(self.now_ns, flying[-1][0] if flying else 0)
                flying.append(
                    (begin_ns + execute_ns, execute_ns, plan.num_tokens, worker.run(plan))
                )
                num_steps += 1
            self.scheduler.take_expired()
            if flying:
                self.now_ns, execute_ns, num_tokens, result = flying.pop(0)
                self.pace.note(num_tokens, execute_ns)
                self.scheduler.apply(result, self.now_ns)
            elif coming:
                self.now_ns = max(self.now_ns, coming[0].arrival_ns)

    def _add(self, request: Request) -> list[Request]:
        try:
            self.scheduler.add(request, self.now_ns, self.pace)
        except HopelessDeadlineError:
            self.hopeless.append(request)
            self.scheduler.add(request, self.now_ns)
        except (InvalidRequestError, QueueFullError):
            return []
        return [request]

    def served_in_time(self, request: Request) -> bool:
        """Whether a request ended by itself before its deadline."""
        return request.finish_reason in {FinishReason.STOP, FinishReason.LENGTH}
