"""The ranks of a worker group: who has each, and for whom one is kept free."""

from typing import NamedTuple


class _Kept(NamedTuple):
    boot_id: int
    until_s: float


class Places:
    """One place a rank. Times are seconds of one monotonic clock, given by the caller.

    A worker has a part of the model loaded, its rank's. So when a group falls apart, each of
    those that are left finds its place again: for a while a stranger gets only the lost one's.
    """

    def __init__(self, num_ranks: int) -> None:
        self._taken: dict[int, int] = {}
        self._kept: dict[int, _Kept] = {}
        self._ranks = range(num_ranks)

    def choose(self, boot_id: int, wanted: int | None, now_s: float) -> int | None:
        """Return the rank for a worker, or None if there is none. Changes nothing.

        A worker that is already there gets its own rank: it came back before it was missed.
        """
        for rank, taken_by in self._taken.items():
            if taken_by == boot_id:
                return rank
        free = []
        for rank in self._ranks:
            kept = self._kept.get(rank)
            if rank in self._taken:
                continue
            if kept is None or now_s >= kept.until_s:
                free.append(rank)
            elif kept.boot_id == boot_id:
                return rank
        if wanted in free:
            return wanted
        return min(free, default=None)

    def take(self, rank: int, boot_id: int) -> None:
        """Give a place away."""
        self._taken[rank] = boot_id
        self._kept.pop(rank, None)

    def leave(self, rank: int) -> None:
        """Have a place free for anybody."""
        del self._taken[rank]

    def keep(self, rank: int, boot_id: int, until_s: float) -> None:
        """Have a place free for one worker alone, until a time."""
        self._kept[rank] = _Kept(boot_id, until_s)

    def why_full(self) -> str:
        """Return in words why there is no place."""
        places = [
            f"rank {rank} is taken by the worker with boot id {boot_id:016x}"
            for rank, boot_id in sorted(self._taken.items())
        ]
        if len(places) < len(self._ranks):
            places.append("the others are kept for workers that should come back")
        return ", ".join(places)
