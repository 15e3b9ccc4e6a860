"""Words to the person at the terminal."""

import contextlib
import sys

# A model's text may hold control characters; a terminal would obey them.
_HARMLESS = dict.fromkeys((*range(32), 127, *range(128, 160)), "\N{REPLACEMENT CHARACTER}")
_HARMLESS |= {ord("\n"): "\n", ord("\t"): "\t"}


def say(text: str) -> None:
    """Write one line to standard error, where it cannot be taken for an answer.

    One that cannot be written is lost: a full disk is no reason to end a server.
    """
    with contextlib.suppress(OSError):
        sys.stderr.write(f"pagemill: {text}\n")
        sys.stderr.flush()


def shown(text: str) -> str:
    """Return a model's text without the control characters that a terminal would obey."""
    return text.translate(_HARMLESS)
