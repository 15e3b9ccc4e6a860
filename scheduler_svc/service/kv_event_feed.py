"""KV events, numbered and kept for a while, for any number of subscribers."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator
from dataclasses import dataclass

from scheduler_svc.core.block_hash import BlockHash
from scheduler_svc.core.errors import SlowReaderError
from scheduler_svc.core.kv_events import (
    BlockRemoved,
    BlocksStored,
    CacheCleared,
    KvEvent,
)

_MAX_BATCH_BYTES = 256 * 1024
_EVENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class KvEventBatch:
    """Consecutive events, or a part of a snapshot."""

    number: int
    """Of the first event. In a snapshot: of the first event behind the snapshot."""

    events: tuple[KvEvent, ...]

    snapshot: bool


class KvEventFeed:
    """The latest `max_events` events, and the index that all of them make.

    Numbers start at `first_number`. A server that starts later must be given a higher one than
    any of the server before; then whoever asks for a number of that one gets a snapshot.

    A subscriber is a place in the events that are kept: it costs nothing while it keeps up.
    """

    def __init__(self, max_events: int, first_number: int) -> None:
        self._ring: list[KvEvent | None] = [None] * max_events
        self._first_number = first_number
        self.next_number = first_number
        """Number of the event that comes next."""
        self._stored: dict[tuple[int, BlockHash], BlocksStored] = {}
        self._changed = asyncio.Event()

    @property
    def oldest_number(self) -> int:
        """Number of the oldest event that is kept."""
        return max(self._first_number, self.next_number - len(self._ring))

    def publish(self, events: Iterable[KvEvent]) -> None:
        """Number events, and wake those who wait for them.

        Cost: 1 us per event.
        """
        before = self.next_number
        for event in events:
            self._ring[self.next_number % len(self._ring)] = event
            self.next_number += 1
            self._follow_index(event)
        if self.next_number != before:
            self._changed.set()
            self._changed = asyncio.Event()

    async def follow(self, start: int | None) -> AsyncGenerator[KvEventBatch, None]:
        """Yield events from number `start` on, as they come, for ever.

        None, or a number whose event is not kept or has not come: a snapshot first, and
        what follows it. The caller bounds the wait.

        Raises: SlowReaderError once the events its reader lacks are not kept any more.
        """
        number = self.next_number
        if start is not None and self.oldest_number <= start <= number:
            number = start
        else:
            for part in _parts([CacheCleared(), *self._stored.values()]):
                yield KvEventBatch(number, part, snapshot=True)
        while True:
            if number < self.oldest_number:
                raise SlowReaderError(
                    f"the next event to send is number {number}, those before "
                    f"{self.oldest_number} are not kept any more: subscribe anew"
                )
            if number == self.next_number:
                await self._changed.wait()
                continue
            part = next(_parts(self._kept(number)))
            yield KvEventBatch(number, part, snapshot=False)
            number += len(part)

    def _kept(self, number: int) -> Iterator[KvEvent]:
        for each in range(number, self.next_number):
            event = self._ring[each % len(self._ring)]
            if event is not None:
                yield event

    def _follow_index(self, event: KvEvent) -> None:
        """Keep each name with an event of its own, so that a snapshot has no more than is there."""
        match event:
            case BlocksStored():
                parent, size = event.parent, 4 * event.block_size
                for place, name in enumerate(event.names):
                    tokens = event.token_ids[place * size : (place + 1) * size]
                    self._stored[event.group, name] = BlocksStored(
                        (name,), parent, tokens, event.block_size, event.adapter, event.group
                    )
                    parent = name
            case BlockRemoved(name=name, group=group):
                self._stored.pop((group, name), None)
            case CacheCleared():
                self._stored.clear()


def _parts(events: Iterable[KvEvent]) -> Iterator[tuple[KvEvent, ...]]:
    """Cut events into messages of some 256 KiB, none of them empty."""
    part: list[KvEvent] = []
    num_bytes = 0
    for event in events:
        part.append(event)
        num_bytes += _EVENT_BYTES
        if isinstance(event, BlocksStored):
            num_bytes += len(event.token_ids) + 32 * len(event.names)
        if num_bytes >= _MAX_BATCH_BYTES:
            yield tuple(part)
            part, num_bytes = [], 0
    if part:
        yield tuple(part)
