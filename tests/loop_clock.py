"""The clock of a running event loop, for tests to put forward instead of waiting."""

import asyncio

import pytest

_STRIDE_S = 0.25
"""Less than what anybody takes for a pause of the whole process."""


class LoopClock:
    """Put forward, what was to happen until then happens, as if the time had passed.

    What the loop waits for from outside, such as a socket, does not come the sooner for it.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Take over the clock of the running loop; `monkeypatch` gives it back."""
        loop = asyncio.get_running_loop()
        time, self._ahead_s = loop.time, 0.0
        monkeypatch.setattr(loop, "time", lambda: time() + self._ahead_s)

    def jump(self, seconds: float) -> None:
        """Let time pass in which the loop does not run."""
        self._ahead_s += seconds

    async def pass_(self, seconds: float) -> None:
        """Let time pass, a little at a time."""
        while seconds > 0:
            self.jump(min(seconds, _STRIDE_S))
            seconds -= _STRIDE_S
            await turn()


async def turn() -> None:
    """Let timers that are due be called, and those go on who waited for them."""
    for _ in range(3):
        await asyncio.sleep(0)
