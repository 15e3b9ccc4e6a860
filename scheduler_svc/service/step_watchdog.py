"""Notices a step whose result does not come, though its worker's heart beats."""

import asyncio
from collections.abc import Callable

SLOW_FACTOR = 20
"""A step may take this many times as long as the slowest of the latest ones, if that is more
than the setting."""

GRACE_S = 1.0
"""After the event loop itself was late: the result may still lie in a socket."""


class StepWatchdog:
    """One timer for the oldest step in flight.

    Cost: two attributes a step, and a timer each time the patience is over.
    """

    __slots__ = ("_begun_s", "_floor_s", "_look_s", "_on_hang", "_slowest_s", "_timer")

    def __init__(
        self, floor_s: float, slowest_s: Callable[[], float], on_hang: Callable[[float], None]
    ) -> None:
        """Call `on_hang` with the seconds a step has taken, once these are too many.

        Too many are `floor_s`, and SLOW_FACTOR times what `slowest_s` returns.
        """
        self._floor_s = floor_s
        self._slowest_s = slowest_s
        self._on_hang = on_hang
        self._begun_s: float | None = None
        self._look_s = 0.0
        """When the timer is due; a handle of uvloop cannot always say."""
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Note that the oldest step in flight begins now: sent, or next behind a result."""
        loop = asyncio.get_running_loop()
        self._begun_s = loop.time()
        if self._timer is None:
            self._look_at(loop, self._due_s(self._begun_s))

    def rest(self) -> None:
        """Note that no step is in flight."""
        self._begun_s = None

    def stop(self) -> None:
        """Look no more."""
        self._begun_s = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _due_s(self, begun_s: float) -> float:
        return begun_s + max(self._floor_s, SLOW_FACTOR * self._slowest_s())

    def _look_at(self, loop: asyncio.AbstractEventLoop, when_s: float) -> None:
        self._look_s = when_s
        self._timer = loop.call_at(when_s, self._look)

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        if self._begun_s is None:
            return
        now_s, due_s = loop.time(), self._due_s(self._begun_s)
        if now_s >= due_s and now_s - self._look_s >= GRACE_S:
            due_s = now_s + GRACE_S
        if now_s < due_s:
            self._look_at(loop, due_s)
            return
        taken_s, self._begun_s = now_s - self._begun_s, None
        self._on_hang(taken_s)
