"""Programs that behave like a scheduler and a worker towards whoever starts them.

`stub_programs.py scheduler|worker pids=FILE [NAME]... [die=STATUS]`. Each writes its process id
into the file; the scheduler becomes healthy when a worker's stands there. `deaf` programs ignore
SIGTERM, a `silent` scheduler never becomes healthy, and who shall `die` does so at once.
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


def main() -> int:
    role = sys.argv[1]
    settings = dict(word.partition("=")[::2] for word in sys.argv[2:])
    pids = Path(settings["pids"])
    with pids.open("a") as file:
        file.write(f"{os.getpid()}\n")
    if "die" in settings:
        sys.stderr.write(f"{role}: something is wrong\n")
        return int(settings["die"])
    stopped = threading.Event()

    def stop(*_: object) -> None:
        if "deaf" not in settings:
            stopped.set()

    signal.signal(signal.SIGTERM, stop)
    if role == "scheduler":
        serve(stopped, pids, silent="silent" in settings)
    # Bounded by the tests, which kill what does not end.
    stopped.wait()
    return 0


def serve(stopped: threading.Event, pids: Path, *, silent: bool) -> None:
    """Be a scheduler until stopped."""
    server = grpc.server(ThreadPoolExecutor(2))
    servicer = health.HealthServicer()
    servicer.set("", Status.NOT_SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(f"listening 127.0.0.1:{port}", flush=True)
    print("workers unix:/nowhere", flush=True)
    while not stopped.wait(0.02):
        if not silent and len(pids.read_text().splitlines()) > 1:
            servicer.set("", Status.SERVING)
    server.stop(None)


if __name__ == "__main__":
    sys.exit(main())
