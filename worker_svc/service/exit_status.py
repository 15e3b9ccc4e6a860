"""How a worker process ends."""

from enum import IntEnum


class ExitStatus(IntEnum):
    """The status of the process, for whatever started it."""

    STOPPED = 0
    """Asked to: by the scheduler, or by SIGTERM or SIGINT."""

    FAILED = 1
    """A step or a plan broke: our bug. Starting again may help."""

    IMPOSSIBLE = 2
    """A setting or the model is impossible. An operator must change it."""

    REFUSED = 3
    """The scheduler will never take this worker: another model, protocol or secret."""

    NO_SCHEDULER = 4
    """Nobody was there to join for --join-timeout seconds, or nobody said where to join."""
