"""What a benchmark of kernels says, and what its cases share."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Final, Protocol, TypeAlias

import torch

COLD_BYTES: Final = 128 << 20
"""What one turn reads at least where memory is the bound: several times the caches."""

Run: TypeAlias = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of `--json`. Fields that say nothing are left out."""

    kernel: str
    case: str

    seconds: float
    """Of one call. The median, as all seconds."""

    bytes_per_second: float | None = None
    share_of_read_bandwidth: float | None = None
    tflops: float | None = None

    sdpa_seconds: float | None = None
    """torch's attention over keys and values that already lie in a row."""

    times_sdpa: float | None = None
    """How many times as fast the kernel is: the median over the pairs. As all `times_`."""

    gather_sdpa_seconds: float | None = None
    """The same, after gathering keys and values from their blocks."""

    times_gather_sdpa: float | None = None
    f_linear_seconds: float | None = None
    """torch's linear layer, its weight as models come; of the type of x where ours is quantised."""

    times_f_linear: float | None = None

    def fields(self) -> dict[str, object]:
        """Return what there is to say."""
        return {name: value for name, value in asdict(self).items() if value is not None}


class Turns(Protocol):
    """Times what is compared in turns."""

    def time(self, *runs: Run) -> list[list[float]]:
        """Return the seconds of each run in each turn, after one turn that is not counted."""
        ...

    def read(self) -> None:
        """Read `COLD_BYTES`, each thread its part."""
        ...


def times(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return how many times as fast as theirs ours is: the median over the pairs."""
    return statistics.median(b / a for a, b in zip(ours, theirs, strict=True))


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name without its module."""
    return str(dtype).removeprefix("torch.")
