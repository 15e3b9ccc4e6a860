"""What happens to the names in the prefix cache, told to others: routers, tiers, tools.

A name is told when a block first gets it, and again when no block has it any more; so whoever
follows all events has the index, name for name, at every moment. A name is told when it is
published, not when it is confirmed: a later request of the same server can hit it from then on.
Should the step that writes the block fail, the name is told as removed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from scheduler_svc.core.block_hash import BlockHash


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Blocks of one request, in chain order, that can be hit from now on."""

    names: tuple[BlockHash, ...]

    parent: BlockHash
    """Name of the block before the first. Empty: the first begins a prompt."""

    token_ids: bytes
    """int32, packed: `block_size` for each name."""

    block_size: int

    adapter: str
    """Name of the request's adapter. Empty: none."""

    group: int = 0
    """KV group of the blocks."""


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """A name that no block of a KV group has any more."""

    name: BlockHash
    group: int = 0


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """No block has a name any more."""


KvEvent: TypeAlias = BlocksStored | BlockRemoved | CacheCleared


class KvEventLog:
    """Events in order, until someone takes them.

    No more pile up than one turn of the shell's loop makes.
    """

    __slots__ = ("_events",)

    def __init__(self) -> None:
        self._events: list[KvEvent] = []

    def add(self, event: KvEvent) -> None:
        """Append an event."""
        self._events.append(event)

    def add_stored(
        self,
        names: Sequence[BlockHash],
        fresh: Sequence[int],
        tokens: memoryview,
        block_size: int,
        adapter: str,
        group: int = 0,
    ) -> None:
        """Tell of those of a request's blocks that are new, by their ascending places.

        `names` are all of the request's, `tokens` (int32) all it knows. Places in one run are
        one event.
        """
        begin = 0
        for end in range(1, len(fresh) + 1):
            if end < len(fresh) and fresh[end] == fresh[end - 1] + 1:
                continue
            first, last = fresh[begin], fresh[end - 1] + 1
            self._events.append(
                BlocksStored(
                    tuple(names[first:last]),
                    names[first - 1] if first else BlockHash(b""),
                    tokens[first * block_size : last * block_size].tobytes(),
                    block_size,
                    adapter,
                    group,
                )
            )
            begin = end

    def take(self) -> list[KvEvent]:
        """Take the events since the last call."""
        events, self._events = self._events, []
        return events
