"""A server's folder goes with it, or with the next one; nobody else's ever does."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from pagemill.cli import run_folder as module
from pagemill.cli.exit_status import CliError
from pagemill.cli.run_folder import SOCKET, run_folder

SERVER = """
from pagemill.cli.run_folder import run_folder
with run_folder() as folder:
    (folder / "scheduler.json").write_text("{}")
    print(folder, flush=True)
    input()
"""


@pytest.fixture
def tmp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where temporary files are; its path is short."""
    with tempfile.TemporaryDirectory(prefix="edges-", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@contextmanager
def server(tmp: Path) -> Iterator[tuple[Path, "subprocess.Popen[str]"]]:
    """Yield the folder of another process, which lives as long as the block at most."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER],
        env={**os.environ, "TMPDIR": str(tmp)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            yield Path(process.stdout.readline().strip()), process
        finally:
            process.kill()


def test_a_folder_goes_with_its_server(tmp: Path) -> None:
    with run_folder() as folder:
        assert folder.parent == tmp
        assert folder.stat().st_mode & 0o777 == 0o700
    assert list(tmp.iterdir()) == []


def test_the_folder_of_a_killed_server_goes_with_the_next(tmp: Path) -> None:
    with server(tmp) as (left, process):
        process.kill()
        process.wait(30)
        assert (left / "scheduler.json").exists()
        with run_folder() as folder:
            assert list(tmp.iterdir()) == [folder]


def test_the_folder_of_a_server_that_lives_stays(tmp: Path) -> None:
    with server(tmp) as (other, _), run_folder() as mine, run_folder() as second:
        assert {*tmp.iterdir()} == {other, mine, second}
        assert (other / "scheduler.json").exists()


def unmarked(folder: Path) -> None:
    (folder / "data").write_text("x")


def marked_by_another(folder: Path) -> None:
    (folder / "owner").write_text("alice\n")


def half_made(folder: Path) -> None:
    (folder / ".owner").write_bytes(module._MARK + b"1\n")


def open_to_others(folder: Path) -> None:
    (folder / "owner").write_bytes(module._MARK + b"1\n")
    folder.chmod(0o755)


def marked_through_a_link(folder: Path) -> None:
    mark = folder.parent / "mark"
    mark.write_bytes(module._MARK + b"1\n")
    (folder / "owner").symlink_to(mark)


def marked_by_a_pipe(folder: Path) -> None:
    os.mkfifo(folder / "owner", 0o600)


@pytest.mark.parametrize(
    "fill",
    [
        unmarked,
        marked_by_another,
        half_made,
        open_to_others,
        marked_through_a_link,
        marked_by_a_pipe,
    ],
)
def test_what_is_not_ours_for_certain_stays(tmp: Path, fill: Callable[[Path], None]) -> None:
    folder = tmp / "pagemill-x"
    folder.mkdir(0o700)
    fill(folder)
    before = sorted(folder.rglob("*"))
    with run_folder():
        pass
    assert sorted(folder.rglob("*")) == before


def test_a_link_to_an_abandoned_folder_stays_and_so_does_the_folder(tmp: Path) -> None:
    elsewhere = tmp / "elsewhere"
    elsewhere.mkdir(0o700)
    (elsewhere / "owner").write_bytes(module._MARK + b"1\n")
    (tmp / "pagemill-x").symlink_to(elsewhere)
    with run_folder():
        pass
    assert (elsewhere / "owner").exists()
    assert (tmp / "pagemill-x").is_symlink()


@pytest.mark.parametrize("name", ["x" * 80, "odd%41", "what?", "number#1"])
@pytest.mark.parametrize("mode", [0o700, 0o755, None])
def test_where_no_socket_can_be_a_safe_place_is_taken_and_told(
    tmp: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    mode: int | None,
) -> None:
    usual, runtime = tmp / name, tmp / "run"
    usual.mkdir()
    if mode is not None:
        runtime.mkdir()
        runtime.chmod(mode)
    monkeypatch.setattr(tempfile, "tempdir", str(usual))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    with run_folder() as folder:
        wanted = runtime if mode == 0o700 else Path("/tmp")
        assert folder.parent == wanted
        bind(folder)
    told = capsys.readouterr().err
    assert told.startswith(f"pagemill: no socket can be in {usual}: its path would have ")
    assert told.endswith(f"; this run's files are in {wanted}\n")


def test_a_place_that_is_taken_holds_the_socket(tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the bound: a byte more and another place would be taken."""
    longest = tmp / (
        "x" * (module._MAX_PATH_BYTES - len(f"{tmp}/") - len("/pagemill-12345678/workers"))
    )
    longest.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(longest))
    with run_folder() as folder:
        assert folder.parent == longest
        bind(folder)
    longest.rename(f"{longest}x")
    monkeypatch.setattr(tempfile, "tempdir", f"{longest}x")
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    with run_folder() as folder:
        assert folder.parent == Path("/tmp")


def bind(folder: Path) -> None:
    server = grpc.server(None)  # type: ignore[arg-type]  # it is never started
    assert server.add_insecure_port(f"unix:{folder / SOCKET}")


def test_no_place_at_all_is_one_sentence(tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = tmp / ("x" * 90)
    usual.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(usual))
    monkeypatch.setattr(module, "_is_sticky", lambda _: False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    with (
        pytest.raises(CliError, match=r"TMPDIR is .* must have at most 103; set a shorter one"),
        run_folder(),
    ):
        pytest.fail("it was made")
