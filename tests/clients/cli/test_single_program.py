"""A command that is another program becomes it: what it was told is passed on."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pagemill.cli.exit_status import CliError
from pagemill.cli.single_program import prepared


def test_the_model_is_found_and_the_rest_passed_on(tmp_path: Path) -> None:
    model = tmp_path / "tiny.gguf"
    model.write_bytes(b"GGUF")
    command, environment = prepared("worker_svc", [str(model), "--join", "unix:/run/w", "--help"])
    assert command[1:] == ("-m", "worker_svc", str(model), "--join", "unix:/run/w", "--help")
    assert environment == {"PAGEMILL_SERVED_MODEL_NAME": "tiny"}


@pytest.mark.parametrize("arguments", [[], ["--help"], ["--config", "x.yaml"]])
def test_without_a_model_everything_is_passed_on(arguments: list[str]) -> None:
    command, environment = prepared("scheduler_svc", arguments)
    assert command == (sys.executable, "-m", "scheduler_svc", *arguments)
    assert environment == {}


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(CliError, match="which is not there"):
        prepared("worker_svc", ["/no/such/model"])


@pytest.mark.parametrize("part", ["scheduler", "worker"])
def test_help_is_the_programs_own(part: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "pagemill.cli", part, "--help"],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0
    assert f"python -m {part}_svc" in ended.stdout
    assert "--log-level" in ended.stdout


@pytest.mark.parametrize("part", ["scheduler", "worker"])
def test_the_programs_exit_status_is_kept(part: str, tmp_path: Path) -> None:
    model = tmp_path / "tiny.gguf"
    model.write_bytes(b"GGUF")
    ended = subprocess.run(
        [sys.executable, "-m", "pagemill.cli", part, str(model), "--log-level", "loud"],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 2
    assert "log_level" in ended.stderr


def _pagemill(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "pagemill.cli", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


def test_simulate_prints_one_json_object() -> None:
    flags = ("--lengths", "alpaca", "--allocator", "paged", "--block-size", "8", "--requests", "9")
    ended = _pagemill("simulate", *flags, "--json")
    assert (ended.returncode, ended.stderr) == (0, "")
    answer = json.loads(ended.stdout)
    assert (answer["requests"], answer["block_size"]) == (9, 8)


@pytest.mark.parametrize("flag", ["--n", "--beam-width"])
def test_simulate_tells_the_blocks_that_forks_save(flag: str) -> None:
    ended = _pagemill("simulate", "--lengths", "sharegpt", "--requests", "40", flag, "2", "--json")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert 0 < json.loads(ended.stdout)["blocks_saved_share"] < 1


def test_bench_step_prints_a_line_for_each_size() -> None:
    ended = _pagemill("bench", "step", "--requests", "4", "--requests", "8", "--json")
    assert (ended.returncode, ended.stderr) == (0, "")
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [line["requests"] for line in lines] == [4, 8]
