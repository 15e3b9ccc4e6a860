"""When to plan the step behind the one that runs: as late as is safe.

A plan made while its predecessor runs hides the way to the worker. Made at once, it shuts out
every request that arrives during that step; made shortly before the step's end, it takes them
in, and they wait one step less.
"""

from collections import deque

SHORT_STEP_NS = 20_000_000
"""Steps expected to be shorter are followed at once: there is little to wait for."""

LEAD_SHARE = 0.25
"""Share of a step that is left for planning and for the way to the worker."""


class PlanPacing:
    """Predicts, from the latest steps, until when the next plan may wait.

    The shortest of them is the prediction: planning too early costs an arrival a step,
    planning too late leaves the worker idle.
    """

    __slots__ = ("_begun_ns", "_execute_ns")

    def __init__(self) -> None:
        self._execute_ns: deque[int] = deque(maxlen=8)
        self._begun_ns = 0

    def step_sent(self, sent_ns: int, *, worker_idle: bool) -> None:
        """Note a plan; an idle worker begins it at once."""
        if worker_idle:
            self._begun_ns = sent_ns

    def step_landed(self, received_ns: int, execute_ns: int) -> None:
        """Note a result, behind which the worker begins its next plan."""
        self._execute_ns.append(execute_ns)
        self._begun_ns = received_ns

    def forget(self) -> None:
        """Start anew, with another worker."""
        self._execute_ns.clear()

    def due_ns(self) -> int:
        """Return the time, in the past or future, from which the step behind may be planned."""
        expected = min(self._execute_ns, default=0)
        if expected < SHORT_STEP_NS:
            return 0
        return self._begun_ns + int(expected * (1 - LEAD_SHARE))
