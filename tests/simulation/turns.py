"""Whose turn it was: under first come, first served, nobody is passed too often."""

from scheduler_svc.core.request import Request
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step_plan import StepPlan
from simulation.setups import Setup


class Turns:
    """Counts who is admitted past whom, of those who were never admitted before."""

    def __init__(self, setup: Setup) -> None:
        # Passing a long prefill that may not start yet takes nothing from it, and is not counted.
        self._is_kept = setup.policy == "fcfs" and not setup.limits.max_long_prefills
        self._most = setup.limits.max_passes
        self._passed: dict[Request, int] = {}

    def queued(self, request: Request) -> None:
        if self._is_kept:
            self._passed[request] = 0

    def admitted(self, plan: StepPlan, scheduler: Scheduler) -> None:
        """Note the admissions of a plan. Who waits in `_passed` has ended or never ran."""
        if not self._is_kept:
            return
        for row in plan.admitted:
            request = scheduler._state.rows.owner(row.row)
            if self._passed.pop(request, None) is None:
                continue
            for other in self._passed:
                if other.sequence < request.sequence and other.finish_reason is None:
                    self._passed[other] += 1
                    assert self._passed[other] <= self._most, "passed too often"
                    assert request.priority <= other.priority, "passed by worse priority"
        if len(self._passed) > 64:
            self._passed = {
                each: count for each, count in self._passed.items() if each.finish_reason is None
            }
