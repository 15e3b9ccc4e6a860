"""When a worker that died is started again, and when not."""

_HOPELESS_STATUSES = frozenset({2, 3})
"""A worker's impossible setting, and a scheduler's refusal: it would end the same way again."""

_MAX_IN_A_ROW = 5
_FIRST_PAUSE_S = 0.5
_STEADY_S = 60.0


class Restarts:
    """Counts deaths in a row. A worker that ran a minute has not died in a row."""

    __slots__ = ("_in_a_row",)

    def __init__(self) -> None:
        self._in_a_row = 0

    def pause_s(self, status: int | None, ran_s: float) -> float | None:
        """Return the seconds to wait before the next start, or None if there is to be none."""
        if ran_s >= _STEADY_S:
            self._in_a_row = 0
        self._in_a_row += 1
        if status in _HOPELESS_STATUSES or self._in_a_row > _MAX_IN_A_ROW:
            return None
        return _FIRST_PAUSE_S * 2.0 ** (self._in_a_row - 1)
