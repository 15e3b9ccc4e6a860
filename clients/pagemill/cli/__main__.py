"""The first lines of the `pagemill` command: what can go wrong before it can say anything."""

import contextlib
import signal
import sys
from collections.abc import Iterator


def main() -> None:
    """Run the command line of this process; never returns."""
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
