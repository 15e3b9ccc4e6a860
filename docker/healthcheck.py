"""`healthcheck.py ADDRESS`: status 0 if the server there can answer now, else 1."""

import sys

from pagemill.client import Client, PagemillError, RetryPolicy

TIMEOUT_S = 2.0


def main(address: str) -> int:
    """Ask grpc.health.v1 once."""
    with Client(address, timeout=TIMEOUT_S, retry=RetryPolicy(max_attempts=1)) as client:
        try:
            return 0 if client.health() else 1
        except PagemillError as error:
            sys.stderr.write(f"{error}\n")
            return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
