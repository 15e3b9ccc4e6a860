"""Plants each bug of the list in a copy of the tree, and says whether the suite sees it."""

import argparse
import math
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
from pagemill.cli.model_source import cache_folder
from source_tree import ROOT

CAUGHT_AT_LEAST = 0.95
TIMEOUT_S = 900.0
SURVIVED = "SURVIVED"
CACHE = "cache"
FOLDERS = ("scheduler_svc", "worker_svc", "kernels", "proto", "clients", "tests", "bench", "docs")
PROOFS = {
    "core": (
        "tests/simulation/test_simulation.py::test_a_hundred_worlds_keep_every_promise",
        "tests/scheduler_svc/core",
        "tests/simulation/test_state_machine.py",
    ),
    "worker": ("tests/worker_svc/runtime", "tests/worker_svc/model"),
    "kernels": ("tests/kernels", "tests/worker_svc/model", "tests/worker_svc/runtime"),
}
"""Tests that must see a bug, in this order: the first failure ends a run."""
BUILDS = "import sys; from kernels.cpu_build import why_no_native_code as why; sys.exit(why())"


class Verdict(NamedTuple):
    """What became of a planted bug."""

    bug: str
    file: str
    caught_by: str
    """The test that failed. Empty: none did."""
    seconds: float

    @property
    def line(self) -> str:
        """A row of a table."""
        said = self.caught_by or SURVIVED
        return f"| {self.bug} | {self.file} | {said} | {self.seconds:.0f} s |"

    @classmethod
    def read(cls, line: str) -> "Verdict":
        """The inverse of `line`."""
        bug, file, said, seconds = line.strip("|\n ").split(" | ")
        return cls(bug, file, "" if said == SURVIVED else said, float(seconds.removesuffix(" s")))


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
            # Native code with a bug is not kept among that of users; models are theirs.
            (root / CACHE).mkdir()
            (root / CACHE / "models").symlink_to(cache_folder(os.environ) / "models")
            queue.put(root)
        yield queue


def tests_for(mutation: Mutation) -> list[list[str]]:
    """Return what to run, one part after the other: the tests of the changed file's own first.

    In one run pytest would drop a file of which it runs the folder, too, and its place.
    """
    first, *others = PROOFS[mutation.proof]
    path = Path(mutation.file)
    own = Path("tests") / path.parent / f"test_{path.stem}.py"
    if mutation.is_native:
        own = Path("tests/kernels") / f"test_cpu_{path.stem}.py"
    hinted = [f"tests/{mutation.hint}"] if mutation.hint else []
    near = [*hinted, *([str(own)] * (ROOT / own).exists())]
    parts = (
        [hinted, [first], near, others] if mutation.proof == "core" else [near, [first, *others]]
    )
    return [part for part in parts if part]


def run_python(root: Path, arguments: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    """Run Python in a copy. Raises: subprocess.TimeoutExpired."""
    environment = {"PYTHONPATH": ".:proto:clients:tests", "PAGEMILL_CACHE": str(root / CACHE)}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=root,
        env={**os.environ, **environment, "OMP_NUM_THREADS": "1"},
        timeout=TIMEOUT_S,
        capture_output=True,
        text=True,
        check=False,
    )


def run_tests(root: Path, tests: Sequence[str]) -> str:
    """Run tests in a copy. Return the one that failed, or nothing.

    Raises: AssertionError if tests cannot be collected: that proves nothing of a bug.
    """
    options = ["-x", "-m", "not slow", "--tb=no", "-rfE", "-p", "no:cacheprovider", "--timeout=120"]
    options.append("--hypothesis-profile=unshrunk")
    # What is compiled for a GPU is no proof of what it computes, and takes minutes.
    options.append("--ignore=tests/kernels/test_compile.py")
    try:
        done = run_python(root, ["-m", "pytest", *options, *tests])
    except subprocess.TimeoutExpired:
        return "a test that hangs"
    shutil.rmtree(root / ".hypothesis", ignore_errors=True)
    if done.returncode == 0:
        return ""
    failed = re.search(
        r"^(?:FAILED|ERROR) \S*?([^/\s]+?)(?:\[\S*)?(?: |$)", done.stdout, re.MULTILINE
    )
    assert not failed or "::" in failed[1], f"{failed[1]} cannot be collected"
    return failed[1] if failed else f"exit status {done.returncode}"


def try_mutation(mutation: Mutation, roots: "SimpleQueue[Path]") -> Verdict:
    """Plant a bug in a copy, run what must see it, and mend the copy.

    Raises: AssertionError if native code does not compile with it: its tests would be skipped.
    """
    root = roots.get()
    began = time.monotonic()
    sound = (root / mutation.file).read_text(encoding="utf-8")
    try:
        mutation.apply(root)
        if mutation.is_native:
            built = run_python(root, ["-c", BUILDS])
            assert built.returncode == 0, f"{mutation.bug}: {built.stderr}"
        failures = (run_tests(root, part) for part in tests_for(mutation))
        caught_by = next(filter(None, failures), "")
    finally:
        mutation.write(root, sound)
        shutil.rmtree(root / CACHE / "kernels", ignore_errors=True)
        roots.put(root)
    return Verdict(mutation.bug, mutation.file, caught_by, time.monotonic() - began)


def verdicts_on(
    chosen: Sequence[Mutation], roots: "SimpleQueue[Path]", processes: int, seconds: float
) -> Iterator[Verdict]:
    """Yield one bug's after the other's; begin none when so many seconds are over."""
    end = time.monotonic() + seconds

    def in_time(mutation: Mutation) -> Verdict | None:
        return try_mutation(mutation, roots) if time.monotonic() < end else None

    with ThreadPoolExecutor(processes) as pool:
        yield from filter(None, pool.map(in_time, chosen))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="mutations", description=__doc__)
    parser.add_argument("--only", default="", help="bugs whose file or line has this text")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--no-baseline", action="store_true", help="the suite is known to pass")
    parser.add_argument(
        "--results", type=Path, help="a file of verdicts: bugs in it are not tried again"
    )
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="begin no bug after this time"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if enough bugs are seen, and the suite passes without any; 2 if some are left."""
    options = parse(arguments)
    chosen = [each for each in mutations() if options.only in f"{each.file}: {each.bug}"]
    if not chosen:
        print(f"no bug has {options.only!r}")
        return 1
    results: Path | None = options.results
    lines = results.read_text("utf-8").splitlines() if results and results.exists() else []
    verdicts = [each for each in map(Verdict.read, lines) if each.bug in {m.bug for m in chosen}]
    known = {each.bug for each in verdicts}
    to_try = [each for each in chosen if each.bug not in known]
    with copies(options.processes) as roots:
        for proof in () if options.no_baseline else sorted({each.proof for each in to_try}):
            if failed := run_tests(next_root := roots.get(), PROOFS[proof]):
                print(f"without any bug, {failed} fails")
                return 1
            roots.put(next_root)
        for verdict in verdicts_on(to_try, roots, options.processes, options.seconds):
            verdicts.append(verdict)
            print(verdict.line, flush=True)
            if results:
                with results.open("a", encoding="utf-8") as file:
                    file.write(f"{verdict.line}\n")
    caught = sum(bool(each.caught_by) for each in verdicts)
    print(f"{caught} of {len(verdicts)} caught: {caught / max(1, len(verdicts)):.1%}")
    if len(verdicts) < len(chosen):
        print(f"{len(chosen) - len(verdicts)} are left")
        return 2
    return int(caught < CAUGHT_AT_LEAST * len(verdicts))


if __name__ == "__main__":
    sys.exit(main())
