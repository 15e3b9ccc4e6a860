"""How much memory the machine, or the container this process is in, still has."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

import psutil

_ROOT: Final = Path("/sys/fs/cgroup")
_MEMBERSHIP: Final = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class _Files:
    """What a version of control groups calls its files."""

    limit: str
    used: str
    inactive: str
    """The field of memory.stat with the bytes of files that can be given up."""


_VERSION_1: Final = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2: Final = _Files("memory.max", "memory.current", "inactive_file")


def available_memory_bytes(root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> int:
    """Return the memory this process may still take: of the machine, or of its control groups.

    Every group that the process is in counts, up to the root: the tightest decides.
    """
    available = int(psutil.virtual_memory().available)
    return min((available, *_left_in_groups(root, membership)))


def total_memory_bytes(root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> int:
    """Return the most memory this process could ever have: the machine's, or a control group's."""
    total = int(psutil.virtual_memory().total)
    return min((total, *_limits_of_groups(root, membership)))


def _limits_of_groups(root: Path, membership: Path) -> Iterator[int]:
    for folder, files in _groups(root, membership):
        try:
            limit = (folder / files.limit).read_text().strip()
        except OSError:
            continue
        if limit != "max":
            yield int(limit)


def _left_in_groups(root: Path, membership: Path) -> Iterator[int]:
    for folder, files in _groups(root, membership):
        try:
            limit = (folder / files.limit).read_text().strip()
            used = int((folder / files.used).read_text())
            lines = (folder / "memory.stat").read_text().splitlines()
        except OSError:
            continue
        if limit != "max":
            stat = dict(line.split() for line in lines)
            # Files that were read and not touched again are given up when memory is short.
            yield max(0, int(limit) - used + int(stat.get(files.inactive, 0)))


def _groups(root: Path, membership: Path) -> Iterator[tuple[Path, _Files]]:
    """Yield the folders that may limit this process. Inside a container the root is its own."""
    yield root, _VERSION_2
    yield root / "memory", _VERSION_1
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        # number:controllers:path; version 2 has no controllers.
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, files = (root / "memory", _VERSION_1) if controllers else (root, _VERSION_2)
        inside = PurePosixPath(path.lstrip("/"))
        for group in (inside, *inside.parents):
            if str(group) != "." and ".." not in group.parts:
                yield top / group, files
