"""How long to wait before dialling again."""

from collections.abc import Callable
from typing import Final

FIRST_DELAY_S: Final = 0.1
LONGEST_DELAY_S: Final = 5.0


class Backoff:
    """Delays that double from 0.1 s to 5 s, each cut by up to half at random.

    The randomness spreads the workers of a scheduler that comes back.
    """

    __slots__ = ("_delay_s", "_uniform")

    def __init__(self, uniform: Callable[[], float]) -> None:
        """Draw from `uniform`, which gives numbers in [0, 1)."""
        self._uniform = uniform
        self._delay_s = FIRST_DELAY_S

    def next_delay_s(self) -> float:
        """Return the next delay in seconds."""
        delay_s = self._delay_s * (1 - self._uniform() / 2)
        self._delay_s = min(2 * self._delay_s, LONGEST_DELAY_S)
        return delay_s

    def reset(self) -> None:
        """Begin again with the shortest."""
        self._delay_s = FIRST_DELAY_S
