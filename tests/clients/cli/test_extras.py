"""A program whose packages are not installed is refused with the command that installs them."""

import subprocess
import sys
from importlib.metadata import requires

import pytest

from pagemill.cli import extras
from pagemill.cli.exit_status import CliError

# Runs the command in an environment that has only the packages of the extra `client`: the others
# are there for this interpreter, but not for who asks.
CLIENT_ALONE = """
import sys
from importlib import metadata
hidden = {"structlog", "torch", "safetensors", "tokenizers"}
found = metadata.Distribution.from_name
def from_name(name):
    if name in hidden:
        raise metadata.PackageNotFoundError(name)
    return found(name)
metadata.Distribution.from_name = from_name
from pagemill.cli.__main__ import main
sys.argv = ["pagemill", *sys.argv[1:]]
main()
"""


def _client_alone(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", CLIENT_ALONE, *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "programs", "wanted"),
    [
        (("serve", "/no/such/model"), "the scheduler and the worker", "scheduler,worker"),
        (("demo",), "the scheduler and the worker", "scheduler,worker"),
        (("scheduler", "/no/such/model"), "the scheduler", "scheduler"),
        (("worker", "--help"), "the worker", "worker"),
        (("simulate",), "the scheduler", "scheduler"),
        (("bench", "kernels"), "the worker", "worker"),
    ],
)
def test_a_command_says_which_extra_it_lacks(
    arguments: tuple[str, ...], programs: str, wanted: str
) -> None:
    ended = _client_alone(*arguments)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert f"{programs} cannot run here; " in ended.stderr
    assert f"'.[{wanted}]'" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_each_program_has_packages_that_are_looked_for() -> None:
    found = list(extras._requirements())
    assert {("structlog", "scheduler"), ("torch", "worker")} <= set(found)
    assert len(found) < len(requires("pagemill") or [])


def test_packages_that_are_lacking_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "_is_here", lambda name: name not in {"torch", "gguf"})
    with pytest.raises(
        CliError, match=r"the worker cannot run here; .* \(not installed: gguf, torch\)"
    ):
        extras.check_installed("worker_svc.bench_kernels", "scheduler_svc")


def test_what_is_installed_is_not_refused() -> None:
    extras.check_installed(*extras.SERVER, "worker_svc.bench_read")
