"""When the engine looks again whether the next plan is due."""

import asyncio
from collections.abc import Callable


class PlanTimer:
    """Wakes the engine once; a later time replaces an earlier one."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._timer: asyncio.TimerHandle | None = None

    def set(self, delay_ns: int) -> None:
        """Wake after so many nanoseconds, and not as was said before."""
        self.stop()
        self._timer = asyncio.get_running_loop().call_later(delay_ns / 1e9, self._wake)

    def stop(self) -> None:
        """Wake nobody."""
        if self._timer is not None:
            self._timer.cancel()
