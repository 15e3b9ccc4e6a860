"""Skipping ahead: who may be admitted before a request that does not fit now, and how often."""

from scheduler_svc.core.limits import Limits
from scheduler_svc.core.request import Request

MAX_HELD = 8
"""Requests that do not fit and are looked past in one step; each costs a prefix lookup."""


class SkipAhead:
    """One step's view of the requests that were held back in their turn.

    Invariant: a request is passed by at most `max_passes` others, and by none once
        `max_pass_ns` have gone by since it was first held back. None passes a request that
        lost its blocks before, or one of better priority.
    """

    __slots__ = ("_held", "_limits", "_now_ns", "_num_looks", "_priority")

    def __init__(self, limits: Limits, now_ns: int) -> None:
        self._limits = limits
        self._now_ns = now_ns
        self._held: list[Request] = []
        self._num_looks = 0
        self._priority: int | None = None

    @property
    def is_head(self) -> bool:
        """Nobody has been held back before the request at hand."""
        return not self._num_looks

    def allows(self, request: Request) -> bool:
        """Whether a request may pass those held back."""
        return self._priority is None or request.priority <= self._priority

    def hold(self, request: Request, *, for_memory: bool) -> bool:
        """Hold a request back; False if nobody may pass it.

        Not for memory: passing it takes nothing away that it waits for, so it is not counted.
        """
        self._num_looks += 1
        if for_memory:
            if request.held_since_ns is None:
                request.held_since_ns = self._now_ns
            self._held.append(request)
            if self._priority is None or request.priority < self._priority:
                self._priority = request.priority
        return self._num_looks <= MAX_HELD and (not for_memory or self._is_passable(request))

    def passed(self) -> bool:
        """Count an admission past all held back; False if it must be the last."""
        for request in self._held:
            request.num_passes += 1
        return all(self._is_passable(request) for request in self._held)

    def _is_passable(self, request: Request) -> bool:
        limits = self._limits
        return not request.num_preemptions and (
            request.held_since_ns is None
            or (
                request.num_passes < limits.max_passes
                and self._now_ns - request.held_since_ns < limits.max_pass_ns
            )
        )
