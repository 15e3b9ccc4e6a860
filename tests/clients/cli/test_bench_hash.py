"""`pagemill bench hash` prints what the scheduler's own measurement says."""

import json

import pytest
from typer.testing import CliRunner

from pagemill.cli import bench_hash
from pagemill.cli.command import make_app
from pagemill.cli.program_settings import program
from scheduler_svc.core.hash_algorithms import HASH_ALGORITHMS


def test_it_prints_a_line_for_each_algorithm() -> None:
    result = CliRunner().invoke(make_app(), ["bench", "hash", "--json"])
    assert result.exit_code == 0
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["algorithm"] for line in lines] == list(HASH_ALGORITHMS)
    assert all({*line} == {"algorithm", "us_per_block"} for line in lines)
    # A test machine may be busy, but not that busy.
    assert all(0 < line["us_per_block"] < 10 for line in lines)


@pytest.mark.slow
def test_sha256_takes_at_most_600_ns_a_block() -> None:
    """Marked slow for its machine's sake: it measures."""
    result = CliRunner().invoke(make_app(), ["bench", "hash", "--json"])
    first = json.loads(result.stdout.splitlines()[0])
    assert first["algorithm"] == "sha256"
    assert first["us_per_block"] <= 0.6


def test_it_prints_a_table() -> None:
    result = CliRunner().invoke(make_app(), ["bench", "hash"])
    assert result.exit_code == 0
    assert all(name in result.stdout for name in HASH_ALGORITHMS)


def test_a_measurement_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_hash, "program", lambda _: program("scheduler_svc.no_such_module"))
    result = CliRunner().invoke(make_app(), ["bench", "hash"])
    assert "the measurement ended with status 1" in str(result.exception)
