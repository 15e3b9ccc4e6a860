"""A worker process that waits for a byte from a named pipe in each step, and while it loads.

Waiting in a system call is to Python what a long forward pass is: no signal handler runs.
Usage: python blocking_worker.py ADDRESS PIPE
"""

import os
import sys

from fake_model_host import FakeHost
from worker_svc.runtime.step_plan import StepPlan
from worker_svc.service.exit_status import ExitStatus
from worker_svc.service.logs import make_logger
from worker_svc.service.shutdown import Shutdown, stopped_by_signals
from worker_svc.service.worker import JoinSettings, Worker


def main(address: str, pipe: str) -> ExitStatus:
    descriptor = os.open(pipe, os.O_RDWR)

    def wait(_plan: StepPlan | None = None) -> None:
        os.read(descriptor, 1)

    shutdown = Shutdown()
    with stopped_by_signals(shutdown):
        return Worker(
            FakeHost(step=wait, load=wait),
            JoinSettings(address=address, secret="", timeout_s=30.0),
            shutdown,
            make_logger(sys.stderr, "text", "info"),
            exit_now=lambda: os._exit(ExitStatus.STOPPED),
        ).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
