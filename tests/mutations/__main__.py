"""Plants each bug of the list in a copy of the tree, and says whether the suite sees it."""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from mutations.planted import Mutation, mutations
from source_tree import ROOT

CAUGHT_AT_LEAST = 0.95
TIMEOUT_S = 900.0
FOLDERS = ("scheduler_svc", "worker_svc", "kernels", "proto", "clients", "tests")
PROOFS = {
    "core": (
        "tests/simulation/test_simulation.py::test_a_hundred_worlds_keep_every_promise",
        "tests/scheduler_svc/core",
        "tests/simulation/test_state_machine.py",
    ),
    "worker": ("tests/worker_svc/runtime", "tests/worker_svc/model"),
}
"""Tests that must see a bug, in this order: the first failure ends a run."""


class Verdict(NamedTuple):
    """What became of a planted bug."""

    mutation: Mutation
    caught_by: str
    """The test that failed. Empty: none did."""
    seconds: float


@contextmanager
def copies(count: int) -> Iterator["SimpleQueue[Path]"]:
    """Yield so many copies of the tree."""
    with tempfile.TemporaryDirectory(prefix="pagemill-mutations-") as folder:
        queue: SimpleQueue[Path] = SimpleQueue()
        for number in range(count):
            root = Path(folder) / str(number)
            for name in FOLDERS:
                ignored = shutil.ignore_patterns("__pycache__", ".hypothesis")
                shutil.copytree(ROOT / name, root / name, ignore=ignored)
            shutil.copy(ROOT / "pyproject.toml", root)
            queue.put(root)
        yield queue


def tests_for(mutation: Mutation) -> list[str]:
    """Return what to run: the tests of the changed file's own come before those of all others."""
    first, *others = PROOFS[mutation.proof]
    path = Path(mutation.file)
    own = Path("tests") / path.parent / f"test_{path.stem}.py"
    hinted = [f"tests/{mutation.hint}"] if mutation.hint else []
    return [first, *hinted, *([str(own)] if (ROOT / own).exists() else []), *others]


def run_tests(root: Path, tests: Sequence[str]) -> str:
    """Run tests in a copy. Return the one that failed, or nothing."""
    command = [sys.executable, "-m", "pytest", "-x", "-m", "not slow", "--tb=no", "-rfE"]
    try:
        done = subprocess.run(
            [*command, "-p", "no:cacheprovider", "--timeout=120", *tests],
            cwd=root,
            env={**os.environ, "PYTHONPATH": ".:proto:clients:tests", "OMP_NUM_THREADS": "1"},
            timeout=TIMEOUT_S,
            capture_output=True,
            text=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "a test that hangs"
    shutil.rmtree(root / ".hypothesis", ignore_errors=True)
    if done.returncode == 0:
        return ""
    failed = re.search(
        r"^(?:FAILED|ERROR) \S*?([^/\s]+?)(?:\[\S*)?(?: |$)", done.stdout, re.MULTILINE
    )
    return failed[1] if failed else f"exit status {done.returncode}"


def try_mutation(mutation: Mutation, roots: "SimpleQueue[Path]") -> Verdict:
    """Plant a bug in a copy, run what must see it, and mend the copy."""
    root = roots.get()
    began = time.monotonic()
    sound = (root / mutation.file).read_text(encoding="utf-8")
    try:
        mutation.apply(root)
        caught_by = run_tests(root, tests_for(mutation))
    finally:
        mutation.write(root, sound)
        roots.put(root)
    return Verdict(mutation, caught_by, time.monotonic() - began)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if enough bugs are seen, and the suite passes without any."""
    parser = argparse.ArgumentParser(prog="mutations", description=__doc__)
    parser.add_argument("--only", default="", help="bugs whose file or line has this text")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--no-baseline", action="store_true", help="the suite is known to pass")
    options = parser.parse_args(arguments)
    chosen = [each for each in mutations() if options.only in f"{each.file}: {each.bug}"]
    verdicts: list[Verdict] = []
    with copies(options.processes) as roots, ThreadPoolExecutor(options.processes) as pool:
        for proof in () if options.no_baseline else sorted({each.proof for each in chosen}):
            if failed := run_tests(next_root := roots.get(), PROOFS[proof]):
                print(f"without any bug, {failed} fails")
                return 1
            roots.put(next_root)
        for verdict in pool.map(lambda each: try_mutation(each, roots), chosen):
            verdicts.append(verdict)
            said = verdict.caught_by or "SURVIVED"
            mutation = verdict.mutation
            print(
                f"| {mutation.bug} | {mutation.file} | {said} | {verdict.seconds:.0f} s |",
                flush=True,
            )
    caught = sum(bool(each.caught_by) for each in verdicts)
    print(f"{caught} of {len(verdicts)} caught: {caught / len(verdicts):.1%}")
    return int(caught < CAUGHT_AT_LEAST * len(verdicts))


if __name__ == "__main__":
    sys.exit(main())
