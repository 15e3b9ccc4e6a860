"""The scheduler's command: from a command line to an exit status."""

import asyncio
import os
import sys
from collections.abc import Sequence
from types import TracebackType

import structlog

from scheduler_svc.config import read_settings
from scheduler_svc.errors import ConfigError
from scheduler_svc.service.logs import configure_logs
from scheduler_svc.service.server import run_server

try:
    from uvloop import new_event_loop
except ImportError:  # Windows has none
    from asyncio import new_event_loop  # type: ignore[assignment]  # another kind of loop

STOPPED, INSISTED, IMPOSSIBLE = 0, 1, 2


def run(argv: Sequence[str] | None = None) -> int:
    """Run the scheduler until a signal, and return its exit status.

    0 after a drain, 1 if a second signal cut it short, 2 if a setting is impossible. A failure
    of ours is raised; it is logged, and ends the process with status 1.
    """
    try:
        settings = read_settings(sys.argv[1:] if argv is None else argv)
        configure_logs(settings.log_format, settings.log_level, sys.stderr)
        sys.excepthook = _log_failure
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(run_server(settings, os.environ, _announce))
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return IMPOSSIBLE
    except asyncio.CancelledError:
        return INSISTED
    return STOPPED


def _announce(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _log_failure(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    structlog.get_logger("main").critical("failed", exc_info=(kind, error, traceback))
