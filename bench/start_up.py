"""Seconds from starting `pagemill serve` to its `ready` line, and the parts of its worker's start.

    python3 bench/start_up.py --rounds 5 --tree before=OTHER_TREE --tree now=. -- \
        --device cpu --dtype bfloat16

What follows `--` goes to `pagemill serve demo`. Trees take turns. One JSON line a tree, medians:
`ready_s` with its least and most; `import_s`, `address_s`, `dial_s`, `load_s` and `cache_s` as the
worker logs them (older trees log none); `around_s` is what is left, that of the command before
and behind its worker.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

TIMEOUT_S = 120


def start_once(tree: Path, flags: Sequence[str]) -> dict[str, float]:
    """Start a server of a source tree and stop it; return the seconds of its start.

    Raises: RuntimeError, with what it said, if it does not come up.
    """
    roots = (tree, tree / "proto", tree / "clients")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(str(root) for root in roots)}
    own = ("--listen=127.0.0.1:0", "--log-format=json", f"--ready-timeout={TIMEOUT_S}")
    command = (sys.executable, "-m", "pagemill.cli", "serve", "demo", *own, *flags)
    with tempfile.TemporaryFile("w+") as log:
        started_s = time.perf_counter()
        with subprocess.Popen(
            command, cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
        ) as server:
            assert server.stdout is not None
            line = server.stdout.readline()
            ready_s = time.perf_counter() - started_s
            server.send_signal(signal.SIGTERM)
            server.wait(TIMEOUT_S)
        log.seek(0)
        said = log.read()
    if not line.startswith("ready "):
        raise RuntimeError(f"{tree} did not come up:\n{said}")
    parts = parts_of(said)
    around = {"around_s": ready_s - parts["in_all_s"]} if parts else {}
    return {"ready_s": ready_s, **parts, **around}


def parts_of(log: str) -> dict[str, float]:
    """Return what a worker's log says of its start; nothing, if it says nothing."""
    for line in log.splitlines():
        if line.startswith("{") and (event := json.loads(line)).get("event") == "started":
            return {name: value for name, value in event.items() if name.endswith("_s")}
    return {}


def summary(name: str, runs: Sequence[Mapping[str, float]]) -> dict[str, object]:
    """Return the medians of a tree's runs."""
    totals = [run["ready_s"] for run in runs]
    return {
        "tree": name,
        "runs": len(runs),
        **{part: round(statistics.median(run[part] for run in runs), 3) for part in runs[0]},
        "ready_s_least": round(min(totals), 3),
        "ready_s_most": round(max(totals), 3),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Start the servers of the command line in turns, and print a JSON line for each tree."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tree", action="append", metavar="NAME=FOLDER")
    parser.add_argument("flags", nargs="*", help="Of `pagemill serve`, behind `--`.")
    options = parser.parse_args(argv)
    named = [text.partition("=") for text in options.tree or ["here=."]]
    trees = {name: Path(folder).resolve() for name, _, folder in named}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    for _ in range(options.rounds):
        for name, tree in trees.items():
            runs[name].append(start_once(tree, options.flags))
    for name, found in runs.items():
        sys.stdout.write(f"{json.dumps(summary(name, found))}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
