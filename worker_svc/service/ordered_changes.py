"""Changes of adapters take effect between the plans that they were sent between, on every rank."""

from collections import deque

from pagemill.v1 import worker_pb2
from worker_svc.service.adapter_loading import AdapterLoading, Answer


class OrderedChanges:
    """The changes of one stream, each behind as many plans as it says.

    Changes come to a rank on its own stream, plans by way of rank 0: a drop could come before
    the last plan with a row of its slot. What waits is bounded by the scheduler, which has one
    change in flight for a slot, and drops it once at most.
    """

    def __init__(self, loading: AdapterLoading, answer: Answer) -> None:
        """Give `loading` each change, in order, with the way to answer it."""
        self._loading = loading
        self._answer = answer
        self._num_plans = 0
        self._waiting: deque[worker_pb2.AdapterChange] = deque()

    def take(self, change: worker_pb2.AdapterChange) -> None:
        """Follow a change now, or behind the plans that it waits for."""
        self._waiting.append(change)
        self._follow()

    def note_plan(self) -> None:
        """Count a plan that has run."""
        self._num_plans += 1
        self._follow()

    def _follow(self) -> None:
        while self._waiting and self._waiting[0].num_plans_before <= self._num_plans:
            self._loading.take(self._waiting.popleft(), self._answer)
