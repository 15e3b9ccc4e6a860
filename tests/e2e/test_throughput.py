"""The throughput bench: its lines, and that it stands being stopped between cells."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tiny_llama import write_tiny_llama

LIMIT_S = 120.0
# Longer than three heartbeats of a worker, behind which a scheduler gives it up.
STOPPED_S = 3.5


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"), max_position_embeddings=2048)


def command(model: Path, *flags: str) -> list[str]:
    flags = ("--dtype", "float32", "--threads", "1", *flags)
    return [sys.executable, "-m", "pagemill.cli", "bench", "throughput", str(model), *flags]


class Stdin:
    """The bench with --stdin, in a process group of its own."""

    def __init__(self, model: Path) -> None:
        self.process = subprocess.Popen(
            command(model, "--stdin"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            process_group=0,
        )

    def read(self) -> dict[str, Any]:
        """Return the next line; the test's own limit bounds the wait."""
        assert self.process.stdout is not None
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def ask(self, cell: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(cell + "\n")
        return self.read()

    def group(self) -> dict[str, str]:
        """Return the state of each program of ours in the group."""
        listing = subprocess.run(
            ["ps", "-eo", "pgid=,stat=,args="], capture_output=True, text=True, check=True
        ).stdout
        found = {}
        for line in listing.splitlines():
            group, state, arguments = line.split(None, 2)
            if int(group) == self.process.pid:
                for module in ("pagemill.cli", "scheduler_svc", "worker_svc"):
                    if f"-m {module}" in arguments:
                        found[module] = state
        return found


@pytest.fixture
def bench(tiny: Path) -> Iterator[Stdin]:
    running = Stdin(tiny)
    try:
        yield running
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.process.pid, signal.SIGKILL)
        running.process.wait(LIMIT_S)
        for stream in (running.process.stdin, running.process.stdout):
            assert stream is not None
            stream.close()


@pytest.mark.timeout(LIMIT_S)
def test_a_bench_that_was_stopped_as_a_group_answers_the_next_cell(bench: Stdin) -> None:
    assert bench.read()["ready"] is True
    assert bench.ask("garbage").keys() == {"cell", "error"}
    assert "must have fewer than 2048" in bench.ask("1x3000x1")["error"]
    before = bench.ask("2x8/4")
    os.killpg(bench.process.pid, signal.SIGSTOP)
    time.sleep(STOPPED_S)
    assert {state[0] for state in bench.group().values()} == {"T"}
    assert bench.group().keys() == {"pagemill.cli", "scheduler_svc", "worker_svc"}
    os.killpg(bench.process.pid, signal.SIGCONT)
    after = bench.ask("3x16/5")

    for line, cell, outputs, total in ((before, "2x8/4", 8, 24), (after, "3x16/5", 15, 63)):
        assert line["cell"] == cell
        assert line["complete"] is True
        assert line["out_tok_s"] * line["wall_s"] == pytest.approx(outputs, rel=0.01)
        assert line["total_tok_s"] * line["wall_s"] == pytest.approx(total, rel=0.01)
    assert bench.process.stdin is not None
    bench.process.stdin.close()
    assert bench.process.wait(LIMIT_S) == 0
    assert bench.group() == {}


@pytest.mark.timeout(LIMIT_S)
def test_a_bench_that_waits_for_a_cell_ends_when_it_is_interrupted(bench: Stdin) -> None:
    assert bench.read()["ready"] is True
    os.killpg(bench.process.pid, signal.SIGINT)
    # Its standard input stays open.
    assert bench.process.wait(LIMIT_S / 4) == 130
    assert bench.group() == {}


@pytest.mark.timeout(LIMIT_S)
def test_each_cell_is_one_line_and_one_row_is_set_against_the_weights(tiny: Path) -> None:
    flags = ("--cell", "1x8x6", "--cell", "2x8x4", "--json")
    done = subprocess.run(
        command(tiny, *flags), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    one, two = map(json.loads, done.stdout.splitlines())
    assert (one["cell"], two["cell"]) == ("1x8x6", "2x8x4")
    for line in (one, two):
        assert line["complete"] is True
        assert 0 < line["output_tok_s"] < line["total_tok_s"]
        assert line["mean_step_ms"] * line["steps"] == pytest.approx(
            1000 * line["wall_s"], rel=0.01
        )
    floor_ms = one["weight_bytes"] / (1e6 * one["read_bandwidth_gb_s"])
    assert one["step_over_floor"] == pytest.approx(one["decode_step_ms"] / floor_ms, rel=0.05)
    assert "weight_bytes" not in two


def test_what_is_not_served_is_refused_before_anything_starts(tiny: Path) -> None:
    for flags, complaint in (
        (("--quantization", "int3"), "must be none, int8 or int4"),
        (("--cell", "1x2"), "such as 32x128x64"),
        (("--stdin", "--cell", "1x1x1"), "not from both"),
    ):
        done = subprocess.run(
            command(tiny, *flags), capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        assert done.returncode == 2
        assert complaint in done.stderr
