"""Pins: prefixes that stay in the cache for a client, within a quota, until their time is over."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from scheduler_svc.core.errors import PinQuotaError
from scheduler_svc.core.free_block_queue import BlockId


class PinEnd(Enum):
    """Why a pin holds blocks no more."""

    UNPINNED = "unpinned"
    """Its client let go of it."""

    EXPIRED = "expired"
    """Its time to live is over."""

    BROKEN = "broken"
    """The only way to go on was to take its blocks."""

    RETRACTED = "retracted"
    """The content of its first block is in doubt."""

    FLUSHED = "flushed"
    """The cache was flushed."""

    LOST = "lost"
    """The worker's process ended, and its cache with it."""


@dataclass(slots=True, eq=False)
class Pin:
    """The leading blocks of a prefix, kept."""

    number: int
    blocks: list[BlockId]
    expires_ns: int


@dataclass(frozen=True, slots=True)
class EndedPin:
    """A pin that holds blocks no more."""

    number: int
    cause: PinEnd


class Pins:
    """Which blocks are pinned, by which pins. What that means for a block, `BlockPool` knows.

    One object serves all pools of a scheduler, so that no number is given twice.

    Cost: O(1) per block pinned or let go, and O(pins) when the pin that is due next ends;
        retracting a pinned block looks at every pin.
    """

    __slots__ = (
        "_ended",
        "_holders",
        "_next_number",
        "_pins",
        "max_blocks",
        "next_expiry_ns",
        "num_broken",
    )

    def __init__(self, max_blocks: int = 0) -> None:
        self.max_blocks = max_blocks
        """Most blocks that may be pinned, and most pins."""
        self.next_expiry_ns: int | None = None
        """When the first of the pins ends by itself. None: there is none."""
        self.num_broken = 0
        """Pins broken since start."""
        self._pins: dict[int, Pin] = {}
        self._holders: dict[BlockId, int] = {}
        self._ended: list[EndedPin] = []
        self._next_number = 1

    def __contains__(self, block: BlockId) -> bool:
        return block in self._holders

    def __iter__(self) -> Iterator[Pin]:
        """Yield the pins, oldest first."""
        return iter(self._pins.values())

    @property
    def num_blocks(self) -> int:
        """Pinned blocks, in use or idle, each once."""
        return len(self._holders)

    def add(self, blocks: Sequence[BlockId], expires_ns: int) -> tuple[Pin, list[BlockId]]:
        """Make a pin; return it, and those of its blocks that were not pinned before.

        Raises: PinQuotaError. Nothing is changed then.
        """
        fresh = [block for block in blocks if block not in self._holders]
        total = len(self._holders) + len(fresh)
        if total > self.max_blocks:
            raise PinQuotaError(
                f"with {len(fresh)} more, {total} blocks would be pinned, at most "
                f"{self.max_blocks} may: see max_pinned_share"
            )
        if len(self._pins) >= self.max_blocks:
            raise PinQuotaError(
                f"there are {len(self._pins)} pins, as many as blocks may be pinned"
            )
        pin = Pin(self._next_number, list(blocks), expires_ns)
        self._next_number += 1
        self._pins[pin.number] = pin
        if self.next_expiry_ns is None or expires_ns < self.next_expiry_ns:
            self.next_expiry_ns = expires_ns
        for block in blocks:
            self._holders[block] = self._holders.get(block, 0) + 1
        return pin, fresh

    def end(self, number: int, cause: PinEnd) -> list[BlockId] | None:
        """End a pin; return the blocks no pin holds any more, the last first. None: no such pin."""
        pin = self._pins.pop(number, None)
        if pin is None:
            return None
        if pin.expires_ns == self.next_expiry_ns:
            self.next_expiry_ns = min((pin.expires_ns for pin in self), default=None)
        self._ended.append(EndedPin(number, cause))
        self.num_broken += cause is PinEnd.BROKEN
        return self._let_go(pin.blocks[::-1])

    def cut_at(self, block: BlockId) -> list[BlockId]:
        """Shorten pins to what lies before a block; return the blocks no pin holds any more.

        A pin that begins with the block ends.
        """
        freed: list[BlockId] = []
        for pin in [pin for pin in self if block in pin.blocks]:
            place = pin.blocks.index(block)
            if not place:
                freed += self.end(pin.number, PinEnd.RETRACTED) or []
                continue
            freed += self._let_go(pin.blocks[: place - 1 : -1])
            del pin.blocks[place:]
        return freed

    def expired(self, now_ns: int) -> list[int]:
        """Return the numbers of pins whose time is over. Cost: O(1) if there are none."""
        if self.next_expiry_ns is None or now_ns < self.next_expiry_ns:
            return []
        return [pin.number for pin in self if pin.expires_ns <= now_ns]

    def start_pool(self, max_blocks: int) -> None:
        """Begin with a pool whose blocks are all empty: pins of another are lost."""
        for number in list(self._pins):
            self.end(number, PinEnd.LOST)
        self.max_blocks = max_blocks

    def take_ended(self) -> list[EndedPin]:
        """Take the pins that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def _let_go(self, blocks: Iterable[BlockId]) -> list[BlockId]:
        holders, freed = self._holders, []
        for block in blocks:
            holders[block] -= 1
            if not holders[block]:
                del holders[block]
                freed.append(block)
        return freed
