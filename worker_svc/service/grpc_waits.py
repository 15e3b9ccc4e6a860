"""How long gRPC's synchronous calls sleep before they look whether they were woken."""

from typing import Final

from grpc import _common

LONGEST_SLEEP_S: Final = 5.0


def sleep_until_woken() -> None:
    """Have calls of this process sleep through: every event wakes them.

    By itself gRPC looks ten times a second besides, so that Python 2 could be interrupted, and has
    no option for that. A reader, which waits all day, took a thousandth of a core for it. Where
    gRPC has no such limit any more, nothing happens.
    """
    if hasattr(_common, "MAXIMUM_WAIT_TIMEOUT"):
        _common.MAXIMUM_WAIT_TIMEOUT = LONGEST_SLEEP_S
