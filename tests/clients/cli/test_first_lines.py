"""Before the command can say anything: an interrupt ends it, a missing package is one line."""

import signal
import subprocess
import sys

import pytest

from interrupted_start import interrupted
from pagemill.cli.exit_status import ExitStatus

# Runs the command where reading it ends as one says.
COMMAND = """
import sys
from importlib.abc import MetaPathFinder
class Interrupted(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "pagemill.cli.options":
            {what}
sys.meta_path.insert(0, Interrupted())
from pagemill.cli.__main__ import main
main()
"""


@pytest.mark.parametrize(
    ("what", "status", "said"),
    [
        (
            "raise ModuleNotFoundError(name='typer')",
            1,
            "pagemill: the command cannot run here: typer is not installed; in Pagemill's source "
            "tree: pip install -c constraints.txt '.[client]'\n",
        ),
    ],
)
def test_what_happens_before_the_command_is_there_is_a_status_and_at_most_a_line(
    what: str, status: int, said: str
) -> None:
    command = [sys.executable, "-c", COMMAND.format(what=what)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (status, "", said)


def test_ctrl_c_while_it_imports_ends_it_without_a_word() -> None:
    program = "from pagemill.cli.__main__ import main; main()"
    assert interrupted(program, "pagemill.cli.options") == (-signal.SIGINT, "", "")


@pytest.mark.parametrize("closed", ["2>&-", ">&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed_change_no_status(closed: str) -> None:
    command = [sys.executable, "-m", "pagemill.cli", "serve", "/no/model"]
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh", *command]
    ended = subprocess.run(shell, check=False, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (ExitStatus.USAGE, "")
    assert ("model is '/no/model', which is not there" in ended.stderr) == ("2>&-" not in closed)
    assert "Traceback" not in ended.stderr


def test_a_module_of_our_own_that_is_missing_is_our_fault() -> None:
    what = "raise ModuleNotFoundError(name='pagemill.cli.options')"
    command = [sys.executable, "-c", COMMAND.format(what=what)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "Traceback" in ended.stderr
