"""Settings come from four places in order; an impossible one is a line with field and bound."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from scheduler_svc.config import SchedulerSettings, read_settings
from scheduler_svc.errors import ConfigError


def test_the_defaults_need_a_model_only() -> None:
    settings = read_settings(["model.gguf"])
    assert settings.model_path == "model.gguf"
    assert (settings.listen, settings.worker_listen) == ("127.0.0.1:50051", "127.0.0.1:50052")
    assert (settings.block_size, settings.max_num_seqs) == (16, 256)
    assert (settings.max_num_batched_tokens, settings.pipeline_depth) == (2048, 2)
    assert (settings.worker_wait, settings.drain_timeout) == (60, 30)
    assert settings.metrics_listen is None
    assert settings.enable_prefix_caching


def test_command_line_wins_over_environment_over_file_over_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "scheduler.yaml"
    file.write_text("block-size: 8\nmax_num_seqs: 8\npipeline_depth: 1\nlisten: 'unix:/a'\n")
    monkeypatch.setenv("PAGEMILL_MAX_NUM_SEQS", "9")
    monkeypatch.setenv("PAGEMILL_PIPELINE_DEPTH", "2")
    settings = read_settings(["m", "--config", str(file), "--pipeline-depth=1"])
    assert (settings.listen, settings.block_size) == ("unix:/a", 8)
    assert (settings.max_num_seqs, settings.pipeline_depth) == (9, 1)
    assert settings.max_num_batched_tokens == 2048


def test_the_environment_names_the_file_and_lists_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "scheduler.yaml"
    file.write_text("worker_wait: 5")
    monkeypatch.setenv("PAGEMILL_CONFIG", str(file))
    monkeypatch.setenv("PAGEMILL_SERVED_MODEL_NAME", "one, two")
    monkeypatch.setenv("PAGEMILL_JOIN_SECRET", "s3cret")
    monkeypatch.setenv("PAGEMILL_CACHE", "of another program")
    settings = read_settings(["m"])
    assert settings.worker_wait == 5
    assert settings.served_model_name == ["one", "two"]
    assert settings.join_secret.get_secret_value() == "s3cret"
    assert "s3cret" not in repr(settings)


@pytest.mark.parametrize(
    "given", ["tenant_weights: {a: 2, b=c: 0.5, '': 3}", "tenant-weights: [a=2, b=c=0.5, '=3']"]
)
def test_tenants_have_weights_from_a_file_the_environment_or_a_flag(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "scheduler.yaml"
    file.write_text(given)
    assert read_settings(["m"]).weights_by_tenant() == {}
    weights = {"a": 2.0, "b=c": 0.5, "": 3.0}
    assert read_settings(["m", "--config", str(file)]).weights_by_tenant() == weights
    assert (
        read_settings(["m", "--tenant-weights", "a=2,b=c=0.5, =3"]).weights_by_tenant() == weights
    )
    monkeypatch.setenv("PAGEMILL_TENANT_WEIGHTS", "a=7")
    assert read_settings(["m"]).weights_by_tenant() == {"a": 7.0}


@pytest.mark.parametrize(
    ("weights", "complaint"),
    [
        ("a", "each weight in [0.001, 1000]"),
        ("a=0", "each weight in [0.001, 1000]"),
        ("a=nan", "each weight in [0.001, 1000]"),
        ("a=1e9", "each weight in [0.001, 1000]"),
        ("a=much", "each weight in [0.001, 1000]"),
        ("a=1,b=2,a=3", "names 'a' twice"),
    ],
)
def test_an_impossible_weight_is_named(weights: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=r"^tenant_weights is ") as error:
        read_settings(["m", "--tenant-weights", weights])
    assert complaint in str(error.value)


def test_a_hash_seed_of_digits_is_a_text_wherever_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "scheduler.yaml"
    file.write_text("hash-seed: 0")
    assert read_settings(["m"]).hash_seed == ""
    assert read_settings(["m", "--config", str(file)]).hash_seed == "0"
    assert read_settings(["m", "--hash-seed", "42"]).hash_seed == "42"
    monkeypatch.setenv("PAGEMILL_HASH_SEED", "7")
    assert read_settings(["m"]).hash_seed == "7"


def test_flags_have_the_names_of_vllm() -> None:
    flags = ["--no-enable-prefix-caching", "--num-gpu-blocks-override", "24"]
    flags += ["--served-model-name", "a", "--served-model-name", "b", "--max-model-len", "64"]
    flags += ["--prefix-caching-hash-algo", "xxhash_cbor"]
    settings = read_settings(["m", *flags])
    assert settings.prefix_caching_hash_algo == "xxhash_cbor"
    assert not settings.enable_prefix_caching
    assert settings.num_gpu_blocks_override == 24
    assert settings.served_model_name == ["a", "b"]
    assert settings.max_model_len == 64


def test_a_small_token_budget_lowers_the_rows_unless_they_were_given() -> None:
    assert read_settings(["m", "--max-num-batched-tokens", "32"]).max_num_seqs == 32
    assert read_settings(["m", "--max-num-batched-tokens", "4096"]).max_num_seqs == 256
    with pytest.raises(ConfigError) as error:
        read_settings(["m", "--max-num-batched-tokens", "32", "--max-num-seqs", "64"])
    assert str(error.value) == (
        "max_num_batched_tokens is 32, must be at least max_num_seqs (64), "
        "or some requests could never decode"
    )


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "the following arguments are required: MODEL-PATH"),
        (["m", "other\nERROR"], "unrecognized arguments: other ERROR"),
        (["m", "--nonsense", "1"], "unrecognized arguments: --nonsense 1"),
        (["m", "--block-size"], "argument --block-size: expected one argument"),
        (["m", "--block-size", "0"], "block_size is '0', must be greater than or equal to 1"),
        (["m", "--block-size", "x"], "block_size is 'x', must be a valid integer"),
        (["m", "--max-num-batched-tokens", "x"], "max_num_batched_tokens is 'x', must be"),
        (["m", "--pipeline-depth", "3"], "pipeline_depth is '3', must be less than or equal to 2"),
        (["m", "--scheduling-policy", "lifo"], "scheduling_policy is 'lifo', must be 'fcfs', 'pri"),
        (["m", "--preemption-victim", "oldest"], "preemption_victim is 'oldest', must be 'cheap"),
        (["m", "--max-long-prefills", "2"], "max_long_prefills is 2, must be 0 unless"),
        (["m", "--listen", "here"], "listen is 'here', must be HOST:PORT"),
        (["m", "--listen", ":1"], "listen is ':1', must be HOST:PORT"),
        (["m", "--listen", "a:65536"], "listen is 'a:65536', must be HOST:PORT"),
        (["m", "--listen", "unix:"], "listen is 'unix:', must have the path of a socket"),
        (["m", "--worker-wait", "inf"], "worker_wait is 'inf', must be a finite number"),
        (["m", "--log-format", "xml"], "log_format is 'xml', must be 'text' or 'json'"),
        (["m", "--served-model-name", "a,"], "served_model_name is 'a,', must be names"),
        (["m", "--config", "/nonexistent"], "config is '/nonexistent', which cannot be read"),
        (["", "--block-size", "4"], "model_path is '', "),
    ],
)
def test_an_impossible_setting_is_one_line_with_field_value_and_bound(
    arguments: list[str], complaint: str
) -> None:
    with pytest.raises(ConfigError) as error:
        read_settings(arguments)
    assert str(error.value).startswith(complaint)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("block_sizes: 4", "block_sizes is no setting of the scheduler"),
        ("- a list", "which must hold a mapping of settings"),
        ("a: [", "which cannot be read"),
        ("max_num_seqs: many", "max_num_seqs is 'many', must be a valid integer"),
    ],
)
def test_an_impossible_file_is_one_line(tmp_path: Path, content: str, complaint: str) -> None:
    file = tmp_path / "scheduler.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError) as error:
        read_settings(["m", "--config", str(file)])
    assert complaint in str(error.value)
    assert "\n" not in str(error.value)


def test_settings_are_frozen_documented_and_read_nothing_by_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PAGEMILL_BLOCK_SIZE", "8")
    settings = SchedulerSettings(model_path="m")
    assert settings.block_size == 16
    with pytest.raises(ValidationError):
        settings.block_size = 8
    assert all(field.description for field in SchedulerSettings.model_fields.values())


def test_help_names_each_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        read_settings(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    for field in SchedulerSettings.model_fields.keys() - {"model_path"}:
        assert f"--{field.replace('_', '-')}" in text
