"""The address to join, when standard input says it: one line, within a limit."""

import os
import select
import time
from typing import Final

from worker_svc.config import settled_join
from worker_svc.errors import ConfigError

TOLD_LIMIT_S: Final = 600.0
"""As long as `pagemill serve` waits for a server by itself. Its scheduler listens in a second."""

_MOST_BYTES: Final = 4096
"""Of the line. No name of a host or a socket is as long."""


class NobodyToldError(Exception):
    """Nothing was said in time: whoever started this process forgot it, or hangs."""


def told_address(source: int | None, limit_s: float = TOLD_LIMIT_S) -> str:
    """Return the address in the first line of a file descriptor, or of all until its end.

    What follows the line is not read, or is lost.

    Raises: ConfigError if that is no address, is too long, or there is nothing to read from;
        NobodyToldError if no whole line came within `limit_s`.
    """
    line = b""
    deadline_s = time.monotonic() + limit_s
    try:
        while b"\n" not in line:
            piece = _piece(source, deadline_s)
            if piece is None:
                raise NobodyToldError(
                    f"join is '-', and standard input said no address within {limit_s:g} s"
                )
            line += piece
            if len(line) > _MOST_BYTES:
                raise ConfigError(
                    f"join is '-', and standard input says more than {_MOST_BYTES} bytes in a line"
                )
            if not piece:
                break
    except OSError as error:
        raise ConfigError(f"join is '-', and standard input cannot be read: {error}") from error
    return settled_join(line.partition(b"\n")[0].decode(errors="replace"))


def _piece(source: int | None, deadline_s: float) -> bytes | None:
    """Return what there is to read, b"" at its end. None: nothing came in time."""
    if source is None:
        raise OSError("it is closed")
    poll = select.poll()
    poll.register(source, select.POLLIN)
    if not poll.poll(max(0.0, deadline_s - time.monotonic()) * 1e3):
        return None
    return os.read(source, _MOST_BYTES)
