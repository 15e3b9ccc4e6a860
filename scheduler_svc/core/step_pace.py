"""How fast the latest steps were: what estimates of the future rest on."""

from collections import deque

NUM_STEPS = 64
"""Steps that are remembered."""

MIN_STEPS = 16
"""Steps before anything is said: the first ones of a worker are slow."""


class StepPace:
    """The latest steps of a worker group. Times are the workers' own, in nanoseconds."""

    __slots__ = ("_steps",)

    def __init__(self) -> None:
        self._steps: deque[tuple[int, int]] = deque(maxlen=NUM_STEPS)

    def note(self, num_tokens: int, execute_ns: int) -> None:
        """Note a step that ran so many tokens."""
        self._steps.append((num_tokens, execute_ns))

    def forget(self) -> None:
        """Start anew, with another worker."""
        self._steps.clear()

    def fastest_ns(self) -> int:
        """Return what a step takes at the least. 0: unknown."""
        if len(self._steps) < MIN_STEPS:
            return 0
        return min(execute_ns for _, execute_ns in self._steps)

    def full_ns(self, budget: int) -> int:
        """Return what a step of `budget` tokens takes at the least. 0: unknown.

        A full step is no faster than one of half as many tokens; if there was none of these, it
        is no faster than any.
        """
        if len(self._steps) < MIN_STEPS:
            return 0
        large = [execute_ns for num_tokens, execute_ns in self._steps if 2 * num_tokens >= budget]
        return min(large) if large else self.fastest_ns()

    def slowest_ns(self) -> int:
        """Return what the slowest of the steps took. 0: none was."""
        return max((execute_ns for _, execute_ns in self._steps), default=0)
