"""Every setting reaches the programs that have it, and keeps its place among its sources."""

import json
import os
from pathlib import Path
from typing import get_type_hints

import pytest

from pagemill.cli.exit_status import CliError, ExitStatus
from pagemill.cli.model_source import Model
from pagemill.cli.program_settings import (
    SCHEDULER_SETTINGS,
    WORKER_SETTINGS,
    num_ranks,
    read_config,
    server_programs,
    threads_of_a_rank,
)
from pagemill.cli.serve import serve
from scheduler_svc.config import SchedulerSettings
from scheduler_svc.config import read_settings as read_scheduler_settings
from worker_svc.config import WorkerSettings
from worker_svc.config import read_settings as read_worker_settings

MODEL = Model(Path("/models/tiny.gguf"), "tiny")

# Settings of the programs that `serve` decides itself, or that have no use there.
DECIDED = {"model_path", "config", "join", "join_timeout", "rank_host", "bench_forward"}


def test_the_routes_know_every_setting_of_both_programs() -> None:
    assert set(SchedulerSettings.model_fields) - DECIDED == SCHEDULER_SETTINGS
    shared = {"num_gpu_blocks_override"}  # the scheduler tells the worker
    assert set(WorkerSettings.model_fields) - DECIDED - shared == WORKER_SETTINGS


def test_serve_has_a_flag_for_every_setting_that_is_no_secret() -> None:
    flags = set(get_type_hints(serve)) - {"return", "context", "model", "config", "ready_timeout"}
    assert flags == (SCHEDULER_SETTINGS | WORKER_SETTINGS) - {"join_secret"}


def test_both_programs_read_what_they_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEMILL_BLOCK_SIZE", "4")
    monkeypatch.setenv("PAGEMILL_MAX_WAITING_REQUESTS", "9")
    flags = {
        "listen": "127.0.0.1:0",
        "block_size": 8,
        "enable_prefix_caching": False,
        "dtype": "float32",
        "log_level": "debug",
        "threads": None,
        "ready_timeout": 1.0,
    }
    file = {"max_waiting_requests": 7, "worker_wait": 5, "threads": 3, "dtype": "bfloat16"}
    programs = server_programs(MODEL, flags, file, tmp_path)

    scheduler = read_scheduler_settings(programs.scheduler[3:])
    assert scheduler.model_path == "/models/tiny.gguf"
    assert scheduler.served_model_name == ["tiny"]
    assert scheduler.worker_listen == f"unix:{tmp_path}/workers"
    assert scheduler.block_size == 8  # the flag goes before the environment
    assert scheduler.max_waiting_requests == 9  # the environment goes before the file
    assert scheduler.worker_wait == 5
    assert not scheduler.enable_prefix_caching
    worker = read_worker_settings(programs.worker[3:])
    assert (worker.dtype, worker.threads, worker.log_level) == ("float32", 3, "debug")


def test_what_is_usual_here_gives_way_to_the_file(tmp_path: Path) -> None:
    file = {"served_model_name": "mine", "worker_listen": "0.0.0.0:50052"}
    settings = read_scheduler_settings(server_programs(MODEL, {}, file, tmp_path).scheduler[3:])
    assert settings.served_model_name == ["mine"]
    assert settings.worker_listen == "0.0.0.0:50052"


def test_a_setting_of_neither_program_is_named(tmp_path: Path) -> None:
    with pytest.raises(CliError, match="config names blok_size, no setting") as caught:
        server_programs(MODEL, {}, {"blok_size": 8}, tmp_path)
    assert caught.value.status == ExitStatus.USAGE


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_timeout_that_is_none_is_refused(tmp_path: Path, seconds: float) -> None:
    with pytest.raises(CliError, match=r"ready_timeout is .*, must be a finite number") as caught:
        server_programs(MODEL, {}, {}, tmp_path, ready_timeout_s=seconds)
    assert caught.value.status == ExitStatus.USAGE


def test_a_value_with_a_dash_stays_a_value(tmp_path: Path) -> None:
    programs = server_programs(MODEL, {"threads": -1}, {}, tmp_path)
    assert programs.worker[-1] == "--threads=-1"


def test_a_config_file_may_write_names_as_flags(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("block-size: 8\nserved_model_name: [a, b]\n")
    assert read_config(path) == {"block_size": 8, "served_model_name": ["a", "b"]}


@pytest.mark.parametrize("content", ["[1, 2]", "a: [", "\xff\x00"])
def test_a_config_file_that_is_none_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(CliError, match="config is"):
        read_config(path)
    with pytest.raises(CliError, match="cannot be read"):
        read_config(tmp_path / "missing")


def test_what_is_written_for_a_program_is_json(tmp_path: Path) -> None:
    server_programs(MODEL, {}, {"log_level": "info"}, tmp_path)
    assert json.loads((tmp_path / "worker.json").read_text()) == {"log_level": "info"}


@pytest.mark.parametrize(
    ("flags", "file", "ranks"),
    [
        ({}, {}, 1),
        ({"tensor_parallel_size": 3}, {"tensor_parallel_size": 2}, 3),
        ({"tensor_parallel_size": None}, {"tensor_parallel_size": 2}, 2),
        ({"tensor_parallel_size": 0}, {}, 1),  # which the scheduler refuses
        ({}, {"tensor_parallel_size": "many"}, 1),
    ],
)
def test_as_many_workers_as_ranks_are_started(
    flags: dict[str, object], file: dict[str, object], ranks: int, tmp_path: Path
) -> None:
    assert num_ranks(flags, file) == ranks
    assert server_programs(MODEL, flags, file, tmp_path).num_workers == ranks


def test_ranks_on_one_machine_divide_its_cores_but_one(tmp_path: Path) -> None:
    assert [threads_of_a_rank(2, cores) for cores in (1, 2, 8, 9)] == [1, 1, 3, 4]
    flags = {"tensor_parallel_size": 2}
    for file, threads in (({}, None), ({"threads": 7}, 7)):
        programs = server_programs(MODEL, flags, file, tmp_path)
        found = read_worker_settings(programs.worker[3:]).threads
        assert found is not None
        assert found == (threads or threads_of_a_rank(2, os.cpu_count() or 1))
