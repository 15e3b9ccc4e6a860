"""How far the weights are: a bar on a terminal, and elsewhere a line in the log now and then."""

import time
from collections.abc import Callable
from typing import Final, TextIO

from worker_svc.service.logs import Logger

BAR_WIDTH: Final = 40
"""Characters."""

REDRAW_S: Final = 0.1
LOG_S: Final = 5.0
"""Models that load faster than this say nothing on the way."""


class LoadProgress:
    """Is told how many tensors of how many have been read."""

    def __init__(
        self, stream: TextIO, log: Logger, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        """Draw on `stream` if it is a terminal."""
        self._stream = stream
        self._log = log
        self._now_s = now_s
        self._is_terminal = stream.isatty()
        self._said_s = now_s()

    def __call__(self, done: int, total: int) -> None:
        """Say so, if it is time to. A bar that is full is wiped out."""
        now_s = self._now_s()
        if self._is_terminal:
            if done == total:
                self._stream.write("\r\x1b[K")
            elif now_s - self._said_s >= REDRAW_S:
                full = BAR_WIDTH * done // total
                bar = "#" * full + "." * (BAR_WIDTH - full)
                self._stream.write(f"\rloading weights [{bar}] {done}/{total} tensors")
            else:
                return
            self._stream.flush()
        elif now_s - self._said_s >= LOG_S:
            self._log.info("loading weights", tensors=done, of=total)
        else:
            return
        self._said_s = now_s
