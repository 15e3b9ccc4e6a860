"""The first lines of the `pagemill` command: what can go wrong before it can say anything."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator


def main() -> None:
    """Run the command line of this process; never returns."""
    _open_closed_streams()
    try:
        # It takes a quarter of a second, in which one may press Ctrl-C.
        with _ended_by_interrupts():
            from pagemill.cli.command import main as run  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("pagemill"):
            raise
        sys.exit(
            f"pagemill: the command cannot run here: {error.name} is not installed; in Pagemill's "
            "source tree: pip install -c constraints.txt '.[client]'"
        )
    run()


def _open_closed_streams() -> None:
    """Let nobody be at the other end of the streams that whoever started this process closed.

    Else the next file that is opened would be taken for one of them, by the programs that this one
    starts as well, and Python has none to write a word to.
    """
    modes = {"stdin": "r", "stdout": "w", "stderr": "w"}
    for name, mode in modes.items():
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
            os.set_inheritable(opened, True)
            setattr(sys, name, os.fdopen(opened, mode))


@contextlib.contextmanager
def _ended_by_interrupts() -> Iterator[None]:
    """Have Ctrl-C end the process at once and without a word.

    Python's own exception is lost where it comes in code that runs behind an import; the command
    then went on as if nobody had pressed a key.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


if __name__ == "__main__":
    main()
