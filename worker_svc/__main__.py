"""The worker's command: `python -m worker_svc MODEL_PATH --join HOST:PORT`."""

import gc
import sys
import time


def main() -> int:
    """Run the command line of this process; return its exit status."""
    started_s = time.monotonic()
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
