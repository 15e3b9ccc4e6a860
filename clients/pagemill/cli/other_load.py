"""How busy everybody else kept the machine while something was measured."""

import os
import time
from pathlib import Path
from typing import NamedTuple

# Shorter spans are a few ticks of the kernel's clock: they say nothing.
_LEAST_S = 0.2


class _Sample(NamedTuple):
    at_s: float
    busy_s: float
    ours_s: float


class OtherLoad:
    """Cores that others kept busy since it was made. Linux only; elsewhere it knows nothing.

    All busy time of the machine, less that of this process and its descendants.
    """

    def __init__(self) -> None:
        self._started = _sample()

    def cores(self) -> float | None:
        """Return the mean number of cores, to two digits. None: unknown."""
        started, now = self._started, _sample()
        if started is None or now is None or now.at_s - started.at_s < _LEAST_S:
            return None
        others_s = (now.busy_s - started.busy_s) - (now.ours_s - started.ours_s)
        return round(max(0.0, others_s / (now.at_s - started.at_s)), 2)


def _sample() -> _Sample | None:
    """Return processor seconds since boot, or None where /proc does not tell."""
    try:
        machine = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0]
    except OSError:
        return None
    tick = os.sysconf("SC_CLK_TCK")
    times = [int(word) for word in machine.split()[1:9]]
    busy = sum(times) - times[3] - times[4]  # less idle time and waiting for disks
    parents: dict[int, int] = {}
    used: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # The command's name, in parentheses, may hold anything.
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        parents[int(entry.name)] = int(fields[1])
        # User and system time, also of children that were waited for.
        used[int(entry.name)] = sum(map(int, fields[11:15]))
    ours = sum(ticks for pid, ticks in used.items() if _descends(pid, parents))
    return _Sample(time.perf_counter(), busy / tick, ours / tick)


def _descends(pid: int, parents: dict[int, int]) -> bool:
    """Whether a process is this one, or was started below it."""
    while pid > 1:
        if pid == os.getpid():
            return True
        pid = parents.get(pid, 0)
    return False
