"""The worker's command: `python -m worker_svc MODEL_PATH --join HOST:PORT`."""

import gc
import signal
import sys
import time


def main() -> int:
    """Run the command line of this process; return its exit status."""
    started_s = time.monotonic()
    # Until the worker can stop in order, Ctrl-C ends it without one: Python's exception would show
    # where it came, or be lost in code that runs behind an import.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # What is imported stays. To look for garbage in it again and again while it grows took 0.27 of
    # 1.95 s, and would take as long again with each full collection of a worker that runs.
    gc.disable()
    from worker_svc.command import run  # noqa: PLC0415
    from worker_svc.service.start_clock import StartClock  # noqa: PLC0415

    gc.freeze()
    gc.enable()
    clock = StartClock(started_s)
    clock.ended("import")
    return run(sys.argv[1:], clock)


if __name__ == "__main__":
    sys.exit(main())
