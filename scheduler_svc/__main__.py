"""`python -m scheduler_svc MODEL_PATH`: the first lines of the scheduler."""

import signal
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, by default that of this process, and return its exit status."""
    # Until the scheduler can drain, Ctrl-C ends it without a word: Python's exception would show
    # where it came, or be lost in code that runs behind an import.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from scheduler_svc.command import run  # noqa: PLC0415

    return run(argv)


if __name__ == "__main__":
    sys.exit(main())
