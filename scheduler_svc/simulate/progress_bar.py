"""How far a replay is, on a terminal."""

from typing import TextIO

_WIDTH = 40


class ProgressBar:
    """A line that is written over whenever another hundredth is done, and wiped at the end."""

    def __init__(self, terminal: TextIO) -> None:
        self._terminal = terminal
        self._drawn = -1

    def show(self, done: float) -> None:
        """Show a share from 0 to 1."""
        percent = int(100 * done)
        if percent != self._drawn:
            self._drawn = percent
            bar = ("━" * (_WIDTH * percent // 100)).ljust(_WIDTH)
            self._write(f"\rsimulating {bar} {percent:3} %")

    def wipe(self) -> None:
        """Leave the line as it was before."""
        self._write("\r\033[K")

    def _write(self, text: str) -> None:
        self._terminal.write(text)
        self._terminal.flush()
