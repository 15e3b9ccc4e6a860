"""A stream for logs, which are not worth the end of those who write them."""

import contextlib
from typing import TextIO


class LossyStream:
    """Drops what cannot be written: a full disk or a reader that is gone costs lines only."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text, if that can be. Returns its length."""
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Have it written that far, if that can be."""
        with contextlib.suppress(OSError):
            self._stream.flush()
