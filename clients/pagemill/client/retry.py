"""When to try a call again: only if the server was not there, and only for so long."""

import asyncio
import random
from dataclasses import dataclass

from pagemill.client.errors import PagemillError, UnavailableError


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often a call that found no server is tried again, and how soon."""

    max_attempts: int = 4
    """Tries in all, the first included. 1: never again."""

    first_pause_s: float = 0.1
    """Pause before the second try; it doubles from try to try."""

    max_pause_s: float = 2.0
    """The longest pause, unless the server asks for a longer one."""

    def __post_init__(self) -> None:
        """Raise ValueError, naming the field, its value and its bound."""
        if self.max_attempts < 1:
            raise ValueError(f"max_attempts is {self.max_attempts}, must be at least 1")
        if not 0 <= self.first_pause_s <= self.max_pause_s:
            raise ValueError(
                f"first_pause_s is {self.first_pause_s}, must be from 0 to max_pause_s "
                f"({self.max_pause_s})"
            )

    def pause_s(self, num_failed: int, retry_after_s: float | None, luck: float) -> float:
        """Return the pause after so many failed tries; `luck` in [0, 1) spreads clients.

        The server's RetryInfo is a lower bound: coming back sooner would be refused again.
        """
        backoff = min(self.first_pause_s * 2.0 ** (num_failed - 1), self.max_pause_s)
        return max(backoff * (1 + luck) / 2, retry_after_s or 0.0)


class Attempts:
    """The tries of one call, within one deadline."""

    __slots__ = ("_deadline", "_num_failed", "_policy")

    def __init__(self, policy: RetryPolicy, timeout_s: float) -> None:
        self._policy = policy
        self._deadline = asyncio.get_running_loop().time() + timeout_s
        self._num_failed = 0

    def remaining_s(self) -> float:
        """Return the seconds left for the next try."""
        return max(0.0, self._deadline - asyncio.get_running_loop().time())

    async def pause(self, error: PagemillError) -> None:
        """Wait before the next try, or raise `error` if there is to be none."""
        self._num_failed += 1
        if not isinstance(error, UnavailableError) or self._num_failed >= self._policy.max_attempts:
            raise error
        # Spreading retries needs no secrecy.
        pause_s = self._policy.pause_s(self._num_failed, error.retry_after_s, random.random())  # noqa: S311
        if pause_s >= self.remaining_s():
            raise error
        await asyncio.sleep(pause_s)
