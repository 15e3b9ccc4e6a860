"""Settings come from four places, the later winning; impossible ones are one line that says why."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from worker_svc.config import WorkerSettings, read_settings
from worker_svc.errors import ConfigError


@pytest.fixture(autouse=True)
def _no_settings_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in WorkerSettings.model_fields:
        monkeypatch.delenv(f"PAGEMILL_{name.upper()}", raising=False)


def test_later_sources_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "worker.yaml"
    file.write_text("model-path: from-file\nthreads: 2\nlog_level: debug\ndevice: cpu\n")
    monkeypatch.setenv("PAGEMILL_THREADS", "3")
    monkeypatch.setenv("PAGEMILL_LOG_LEVEL", "error")
    monkeypatch.setenv("PAGEMILL_DTYPE", "")  # as an unset variable looks in a compose file
    settings = read_settings(["--config", str(file), "--threads", "4"])
    assert settings.threads == 4
    assert settings.log_level == "error"
    assert settings.device == "cpu"
    assert settings.model_path == "from-file"
    assert settings.dtype == "auto"
    assert settings.join == "127.0.0.1:50052"
    assert settings.gpu_memory_utilization == 0.92


def test_the_environment_can_name_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "worker.yaml"
    file.write_text("threads: 7\n")
    monkeypatch.setenv("PAGEMILL_CONFIG", str(file))
    assert read_settings(["model"]).threads == 7


@pytest.mark.parametrize("address", ["127.0.0.1:1", "[::1]:65535", "scheduler:50052", "unix:a"])
def test_addresses_are_a_port_or_a_socket(address: str) -> None:
    assert read_settings(["model", "--join", address]).join == address


def test_the_address_to_join_can_be_left_to_standard_input() -> None:
    assert read_settings(["model", "--join", "-"]).join == "-"


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ([], "model_path is '', must be the path of a GGUF file or of a model's directory"),
        (["m", "--threads", "0"], "threads is '0', must be greater than or equal to 1"),
        (["m", "--threads", "many"], "threads is 'many', must be a valid integer"),
        (
            ["m", "--gpu-memory-utilization", "1.5"],
            "gpu_memory_utilization is '1.5', must be less than or equal to 1",
        ),
        (["m", "--join", "here"], "join is 'here', must be HOST:PORT with a port of 1 to 65535"),
        (["m", "--join", ":1"], "join is ':1', must be HOST:PORT"),
        (["m", "--join", "h:0"], "join is 'h:0', must be HOST:PORT"),
        (["m", "--join", "h:65536"], "join is 'h:65536', must be HOST:PORT"),
        (["m", "--join", "unix:"], "join is 'unix:', must be unix: and the path of a socket"),
        (["m", "--device", "tpu"], "device is 'tpu', must be auto, cpu, cuda or cuda:N"),
        (["m", "--dtype", "int8"], "dtype is 'int8', must be 'auto', 'float32', 'bfloat16' or"),
        (["m", "--join-timeout", "-1"], "join_timeout is '-1', must be greater than or equal to 0"),
        (["m", "--join-timeout", "inf"], "join_timeout is 'inf', must be a finite number"),
        (["m", "--kv-cache-memory-bytes", "0"], "kv_cache_memory_bytes is '0', must be greater"),
        (["m", "--num-gpu-blocks-override", "0"], "num_gpu_blocks_override is '0', must be"),
        (["m", "--log-format", "xml"], "log_format is 'xml', must be 'text' or 'json'"),
        (["m", "--tensor-parallel", "2"], "unrecognized arguments: --tensor-parallel 2"),
        (["m", "n"], "unrecognized arguments: n"),
        (["m", "--config", "/nowhere/at.all"], "config is '/nowhere/at.all', which cannot be read"),
    ],
)
def test_an_impossible_setting_is_one_line_with_its_bound(argv: list[str], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_settings(argv)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("blocks: 3\n", "blocks is no setting of a worker"),
        ("threads: [3\n", "config is '"),
        ("- 3\n", "config is '"),
        ("join_secret: 3\n", "join_secret is hidden, must be a valid string"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused(tmp_path: Path, content: str, line: str) -> None:
    file = tmp_path / "worker.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        read_settings(["model", "--config", str(file)])
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


def test_settings_are_frozen_and_do_not_show_the_secret() -> None:
    settings = read_settings(["model", "--join-secret", "open sesame"])
    assert settings.join_secret.get_secret_value() == "open sesame"
    assert "open sesame" not in repr(settings)
    with pytest.raises(ValidationError):
        settings.threads = 3


def test_every_setting_says_what_it_means() -> None:
    assert not [
        name for name, field in WorkerSettings.model_fields.items() if not field.description
    ]
