"""Which of our programs are installed here: each has packages of its own, named by an extra."""

import re
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution, requires

from pagemill.cli.exit_status import CliError

SERVER = ("scheduler_svc", "worker_svc")
"""The programs of a server on this machine."""

_EXTRAS = {"scheduler_svc": "scheduler", "worker_svc": "worker"}
# A requirement whose one condition is its extra. Those with conditions on the platform are left
# out: to judge them takes a package of its own, and none of them stands alone in its extra.
_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)[^;]*; extra == '(?P<extra>[\w-]+)'")


def check_installed(*modules: str) -> None:
    """Check that what some programs need is here, before they end in a traceback.

    Raises: CliError that names what is lacking and the command that installs it.
    """
    needed = {_EXTRAS[top] for module in modules if (top := module.partition(".")[0]) in _EXTRAS}
    lacking: dict[str, list[str]] = {}
    for name, extra in _requirements():
        if extra in needed and not _is_here(name):
            lacking.setdefault(extra, []).append(name)
    if not lacking:
        return
    extras = sorted(lacking)
    packages = ", ".join(dict.fromkeys(name for extra in extras for name in sorted(lacking[extra])))
    raise CliError(
        f"the {' and the '.join(extras)} cannot run here; in Pagemill's source tree: "
        f"pip install -c constraints.txt '.[{','.join(extras)}]' (not installed: {packages})"
    )


def _requirements() -> Iterable[tuple[str, str]]:
    """Yield (package, extra) as our own metadata has them; nothing where we are not installed."""
    try:
        stated = requires("pagemill") or []
    except PackageNotFoundError:
        return
    for line in stated:
        if found := _REQUIREMENT.fullmatch(line):
            yield found["name"], found["extra"]


def _is_here(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True
