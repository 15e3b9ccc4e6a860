"""Commands that tests run to their end; what they say is shown when they fail."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from source_tree import ROOT


def installed(program: str) -> Path:
    """Return the path of a program of the environment that runs the tests."""
    return Path(sys.prefix) / "bin" / program


def run(
    *command: object,
    folder: Path = ROOT,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 120,
) -> str:
    """Run a command and return its standard output.

    Raises: AssertionError with all it printed if its status is not 0.
    """
    done = subprocess.run(
        [*map(str, command)],
        cwd=folder,
        env={**os.environ, **(environment or {})},
        timeout=timeout_s,
        capture_output=True,
        text=True,
        check=False,
    )
    printed = done.stdout + done.stderr
    assert done.returncode == 0, f"{command[0]} ended with {done.returncode}:\n{printed}"
    return done.stdout
