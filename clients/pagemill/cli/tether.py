"""Ties a program to its parent: `tether.py PARENT_PID PROGRAM ARGUMENTS` becomes the program.

A parent that is killed with SIGKILL cannot stop its children; on Linux the kernel then does. A
program of its own, since code between fork and exec is unsafe in a process with gRPC's threads,
and it imports nothing of ours, so that it costs milliseconds. Elsewhere it only runs the program.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: int, command: list[str]) -> None:
    """Have SIGKILL sent to this process when its parent ends, and run the command in it."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
            sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
        if os.getppid() != parent:
            # It ended before the kernel knew of us.
            sys.exit(1)
    os.execv(command[0], command)  # noqa: S606 no shell is wanted


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
