"""Names that were evicted lately: what would have been hit, had the pool been larger."""

from scheduler_svc.core.block_hash import BlockHash


class EvictedNames:
    """The latest `capacity` names that lost their block. Older ones are forgotten.

    Cost: O(1) per name; some 100 bytes for each.
    """

    __slots__ = ("_next", "_places", "_ring")

    def __init__(self, capacity: int) -> None:
        self._ring: list[BlockHash | None] = [None] * capacity
        self._places: dict[BlockHash, int] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: BlockHash) -> bool:
        return name in self._places

    def add(self, name: BlockHash) -> None:
        """Remember a name in place of the oldest, or anew if it is remembered."""
        place, places = self._next, self._places
        oldest = self._ring[place]
        if oldest is not None and places.get(oldest) == place:
            del places[oldest]
        self._ring[place] = name
        places[name] = place
        self._next = place + 1 if place + 1 < len(self._ring) else 0

    def discard(self, name: BlockHash) -> bool:
        """Forget a name, since it has a block again. True if it was remembered."""
        return self._places.pop(name, None) is not None

    def clear(self) -> None:
        """Forget all."""
        self._ring = [None] * len(self._ring)
        self._places.clear()
