"""How long a worker took to start, part by part."""

import time
from collections.abc import Callable, Mapping


class StartClock:
    """Is told the end of each part, in the order in which they follow one another."""

    __slots__ = ("_last_s", "_now_s", "_parts", "_started_s")

    def __init__(self, started_s: float, now_s: Callable[[], float] = time.monotonic) -> None:
        """Begin with the first part, which has lasted since `started_s` by the clock `now_s`."""
        self._started_s = self._last_s = started_s
        self._now_s = now_s
        self._parts: dict[str, float] = {}

    def ended(self, part: str) -> None:
        """Note that a part ends now. One that comes again, as dialling may, is added to."""
        now_s = self._now_s()
        self._parts[part] = self._parts.get(part, 0.0) + now_s - self._last_s
        self._last_s = now_s

    def seconds(self) -> Mapping[str, float]:
        """Return the seconds of each part as `PART_s`, and of all as `in_all_s`."""
        parts = {f"{part}_s": round(seconds, 3) for part, seconds in self._parts.items()}
        return parts | {"in_all_s": round(self._last_s - self._started_s, 3)}
