"""Memory in powers of two: what servers kept sequences in before it was paged."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Region:
    """A stretch of slots of one request."""

    start: int
    """Its first slot, a multiple of its size."""

    order: int
    """Its size is 2 to this power."""

    @property
    def size(self) -> int:
        """Slots of the region."""
        return 1 << self.order


class BuddyAllocator:
    """`num_slots` slots, cut into the largest powers of two that fit, and halved on demand.

    Two halves that are both free grow together again. Of the free regions of a size the first is
    taken, so that a run depends on nothing but its requests.
    """

    __slots__ = ("_free", "_top", "num_allocated")

    def __init__(self, num_slots: int) -> None:
        self.num_allocated = 0
        self._free: list[set[int]] = [set() for _ in range(num_slots.bit_length())]
        # What lies behind the largest region has no other half: it never joins others.
        self._top: dict[int, int] = {}
        start = 0
        for order in reversed(range(num_slots.bit_length())):
            if num_slots >> order & 1:
                self._free[order].add(start)
                self._top[start] = order
                start += 1 << order

    def allocate(self, num_slots: int) -> Region | None:
        """Return the smallest region that holds so many slots. None: no free one does."""
        wanted = (num_slots - 1).bit_length()
        order = next((k for k in range(wanted, len(self._free)) if self._free[k]), None)
        if order is None:
            return None
        start = min(self._free[order])
        self._free[order].remove(start)
        while order > wanted:
            order -= 1
            self._free[order].add(start + (1 << order))
        self.num_allocated += 1 << order
        return Region(start, order)

    def fits(self, num_slots: int) -> bool:
        """Whether an empty memory has a region that large."""
        return (num_slots - 1).bit_length() < len(self._free)

    def release(self, region: Region) -> None:
        """Take a region back."""
        start, order = region.start, region.order
        self.num_allocated -= region.size
        while self._top.get(start) != order:
            other = start ^ (1 << order)
            if other not in self._free[order]:
                break
            self._free[order].remove(other)
            start = min(start, other)
            order += 1
        self._free[order].add(start)
