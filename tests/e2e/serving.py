"""Starts the real programs as a user would, and ends them."""

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

START_LIMIT_S = 120.0
STOP_LIMIT_S = 45.0


@dataclass
class Served:
    """A running `pagemill serve`."""

    process: "subprocess.Popen[str]"
    address: str
    stderr: list[str] = field(default_factory=list)

    def children(self) -> dict[str, int]:
        """Return the process ids of the programs that `serve` started, by module name."""
        return dict(self._programs())

    def _programs(self) -> list[tuple[str, int]]:
        listing = subprocess.run(
            ["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True
        ).stdout
        programs = [line.split(None, 2) for line in listing.splitlines()]
        return [
            (module, int(pid))
            for pid, parent, arguments in programs
            for module in ("scheduler_svc", "worker_svc")
            if int(parent) == self.process.pid and f"-m {module}" in arguments
        ]

    def workers(self) -> set[int]:
        """Return the process ids of all workers that `serve` started."""
        return {pid for module, pid in self._programs() if module == "worker_svc"}

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and return the exit status."""
        self.process.send_signal(number)
        return self.process.wait(STOP_LIMIT_S)

    def log(self) -> str:
        """Return what the programs have written to standard error."""
        return "".join(self.stderr)


@contextmanager
def serving(model: str, *flags: str, listen: str = "127.0.0.1:0") -> Iterator[Served]:
    """Run `pagemill serve` until the block ends; it must end with status 0 then."""
    command = [sys.executable, "-m", "pagemill.cli", "serve", model, "--device", "cpu"]
    command += ["--dtype", "float32", "--listen", listen, *flags]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    served = Served(process, "")
    lines: queue.Queue[str] = queue.Queue()
    readers = [
        threading.Thread(target=_drain, args=(process.stdout, lines.put)),
        threading.Thread(target=_drain, args=(process.stderr, served.stderr.append)),
    ]
    for reader in readers:
        reader.start()
    try:
        served.address = _wait_ready(served, lines)
        yield served
        if process.poll() is None:
            status = served.stop()
            assert status == 0, f"exit status {status}\n{served.log()}"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for reader in readers:
            reader.join()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def _drain(stream: object, take: object) -> None:
    for line in stream:  # type: ignore[attr-defined]
        take(line)  # type: ignore[operator]


def _wait_ready(served: Served, lines: "queue.Queue[str]") -> str:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        try:
            line = lines.get(timeout=0.2)
        except queue.Empty:
            status = served.process.poll()
            assert status is None, f"exit status {status} before ready\n{served.log()}"
            continue
        if line.startswith("ready "):
            return line.split()[1]
    raise AssertionError(f"not ready within {START_LIMIT_S} s\n{served.log()}")
