"""Sets the cost of a steady step against that of another scheduler, turn by turn in one run.

    PYTHONPATH=.:proto python3 bench/step_against_peer.py --rounds 5 -- \
        PEER_PYTHON vllm_scheduler.py --steps 400

What follows `--` is the other scheduler's measurement. It is called with `--only decode --batch N
...` appended and prints a JSON line per size, of which `batch` and `step_us_p10` are read: the
tenth percentile of its steps' wall time. Ours is the median of processor time, collector included.
So what else the machine does is charged to us rather than to the peer. The order turns around
every round; the ratio is the median of the rounds' ratios.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

TIMEOUT_S = 600


def run_peer(command: Sequence[str], sizes: Sequence[int]) -> dict[int, float]:
    """Return the peer's microseconds per step, by size."""
    batches = [str(size) for size in sizes]
    lines = _lines([*command, "--only", "decode", "--batch", *batches])
    return {line["batch"]: line["step_us_p10"] for line in lines if "step_us_p10" in line}


def run_ours(sizes: Sequence[int]) -> dict[int, float]:
    """Return our microseconds per step, by size."""
    command = [sys.executable, "-m", "scheduler_svc.bench_step", "--json"]
    lines = _lines([*command, *(f"--requests={size}" for size in sizes)])
    return {line["requests"]: line["us_per_step"] for line in lines}


def _lines(command: Sequence[str]) -> Iterator[dict[str, Any]]:
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=TIMEOUT_S)
    return (json.loads(line) for line in done.stdout.splitlines() if line.startswith(b"{"))


def compare(command: Sequence[str], sizes: Sequence[int], rounds: int) -> Iterator[dict[str, Any]]:
    """Run both in turns; yield a line per size."""
    peer: list[dict[int, float]] = []
    ours: list[dict[int, float]] = []
    for number in range(rounds):
        if number % 2 == 0:
            peer.append(run_peer(command, sizes))
        ours.append(run_ours(sizes))
        if number % 2:
            peer.append(run_peer(command, sizes))
    for size in sizes:
        pairs = [(theirs[size], mine[size]) for theirs, mine in zip(peer, ours, strict=True)]
        ratios = sorted(theirs / mine for theirs, mine in pairs)
        yield {
            "requests": size,
            "peer_us_per_step": statistics.median(theirs for theirs, _ in pairs),
            "us_per_step": statistics.median(mine for _, mine in pairs),
            "ratio": statistics.median(ratios),
            "ratio_least": ratios[0],
            "ratio_most": ratios[-1],
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Compare at the sizes of the command line, and print a JSON line for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, nargs="+", default=[256, 1024], metavar="N")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("peer", nargs="+", help="The peer's measurement, behind `--`.")
    options = parser.parse_args(argv)
    for line in compare(options.peer, options.requests, options.rounds):
        sys.stdout.write(f"{json.dumps(line)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
