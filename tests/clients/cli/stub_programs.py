"""Programs that behave like a scheduler and a worker towards whoever starts them.

`stub_programs.py scheduler|worker pids=FILE [NAME]... [die=STATUS]`. Each writes its process id
into the file, a worker once it is told where to join; the scheduler becomes healthy when that of a
worker stands there. `deaf` programs ignore SIGTERM, a `silent` scheduler never becomes healthy, a
`late` one listens when a worker has started, and who shall `die` does so at once.
"""

import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

Status = health_pb2.HealthCheckResponse
WORKERS = "unix:/nowhere"


def main() -> int:
    role = sys.argv[1]
    settings = dict(word.partition("=")[::2] for word in sys.argv[2:])
    pids = Path(settings["pids"])
    if "die" in settings:
        note_id(pids)
        sys.stderr.write(f"{role}: something is wrong\n")
        return int(settings["die"])
    stopped = threading.Event()

    def stop(*_: object) -> None:
        if "deaf" not in settings:
            stopped.set()

    signal.signal(signal.SIGTERM, stop)
    started = pids.with_name("worker-started")
    if role == "scheduler":
        note_id(pids)
        while "late" in settings and not started.exists():
            stopped.wait(0.01)
        serve(stopped, pids, silent="silent" in settings)
    else:
        started.touch()
        if sys.stdin.readline() != f"{WORKERS}\n":
            return 5
        note_id(pids)
    # Bounded by the tests, which kill what does not end.
    stopped.wait()
    return 0


def note_id(pids: Path) -> None:
    with pids.open("a") as file:
        file.write(f"{os.getpid()}\n")


def serve(stopped: threading.Event, pids: Path, *, silent: bool) -> None:
    """Be a scheduler until stopped."""
    server = grpc.server(ThreadPoolExecutor(2))
    servicer = health.HealthServicer()
    servicer.set("", Status.NOT_SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(f"listening 127.0.0.1:{port}", flush=True)
    print(f"workers {WORKERS}", flush=True)
    while not stopped.wait(0.02):
        if not silent and len(pids.read_text().splitlines()) > 1:
            servicer.set("", Status.SERVING)
    server.stop(None)


if __name__ == "__main__":
    sys.exit(main())
