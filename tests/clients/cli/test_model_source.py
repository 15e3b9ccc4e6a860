"""A name is demo, a file, a directory or a hub id; what it is not is said in one line."""

from pathlib import Path

import pytest

from pagemill.cli.exit_status import CliError, ExitStatus
from pagemill.cli.model_source import Model, cache_folder, resolve


def test_the_demos_stand_for_models_of_the_package_index(tmp_path: Path) -> None:
    for name in ("demo", "demo-gemma"):
        found = resolve(name, fetch_wheel=lambda name: tmp_path / name)
        assert found == Model(tmp_path / name, name)


def test_a_file_is_served_under_its_own_name(tmp_path: Path) -> None:
    path = tmp_path / "tiny.Q4_1.gguf"
    path.write_bytes(b"GGUF....")
    assert resolve(str(path)) == Model(path, "tiny.Q4_1")


def test_a_directory_is_served_under_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert resolve(".") == Model(Path(), tmp_path.name)


def test_a_hub_id_is_fetched_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fetched: list[str] = []

    def fetch(name: str) -> Path:
        fetched.append(name)
        return tmp_path

    assert resolve("org/Model-1.5_b", fetch_hub=fetch) == Model(tmp_path, "org/Model-1.5_b")
    assert fetched == ["org/Model-1.5_b"]


def test_a_path_goes_before_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org/model").mkdir(parents=True)
    (tmp_path / "org/model/config.json").write_text("{}")
    assert resolve("org/model").path == Path("org/model")


@pytest.mark.parametrize(
    "name",
    [
        *("unknown", "/no/such/file", "../evil", "a/../../evil", "org/", "org/model/more"),
        *("models/tiny.gguf", "-x/y", "org/mo del", "a\nb/c"),
    ],
)
def test_anything_else_is_answered_with_the_four_kinds(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CliError) as caught:
        resolve(name)
    assert caught.value.status == ExitStatus.USAGE
    for kind in ("demo", "GGUF file", "Hugging Face directory", "hub id"):
        assert kind in str(caught.value)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\0" * 16)
    with pytest.raises(CliError, match="no GGUF"):
        resolve(str(path))


def test_a_directory_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CliError, match=r"without config\.json"):
        resolve(str(tmp_path))


def test_the_cache_is_where_the_environment_says() -> None:
    assert cache_folder({"PAGEMILL_CACHE": "/c"}) == Path("/c")
    assert cache_folder({}) == Path.home() / ".cache/pagemill"
