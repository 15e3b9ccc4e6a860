"""Every subscriber gets every event once and in order, or is told that it cannot."""

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.core.block_hash import BlockHash
from scheduler_svc.core.errors import SlowReaderError
from scheduler_svc.core.kv_events import BlockRemoved, BlocksStored, CacheCleared, KvEvent
from scheduler_svc.service.kv_event_feed import KvEventBatch, KvEventFeed
from scheduler_svc.service.kv_event_messages import to_message

FIRST = 1000


def name(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(4, "big"))


def stored(*numbers: int, parent: bytes = b"", size: int = 2) -> BlocksStored:
    """Return an event of blocks whose tokens are all their numbers."""
    tokens = b"".join(number.to_bytes(4, "little") * size for number in numbers)
    return BlocksStored(tuple(map(name, numbers)), BlockHash(parent), tokens, size, "")


def removed(number: int) -> BlockRemoved:
    return BlockRemoved(name(number))


async def batches(feed: KvEventFeed, start: int | None, count: int) -> list[KvEventBatch]:
    async with aclosing(feed.follow(start)) as following, asyncio.timeout(5):
        return [await anext(following) for _ in range(count)]


async def test_a_snapshot_comes_first_and_says_where_events_go_on() -> None:
    feed = KvEventFeed(10, FIRST)
    feed.publish([stored(1, 2), removed(1), stored(3, parent=name(2))])
    (snapshot,) = await batches(feed, None, 1)
    assert (snapshot.number, snapshot.snapshot) == (FIRST + 3, True)
    assert snapshot.events == (
        CacheCleared(),
        stored(2, parent=name(1)),
        stored(3, parent=name(2)),
    )


async def test_a_name_is_one_block_of_each_kv_group() -> None:
    feed = KvEventFeed(10, FIRST)
    windowed = replace(stored(1), group=1)
    feed.publish([stored(1), windowed, BlockRemoved(name(1))])
    (snapshot,) = await batches(feed, None, 1)
    assert snapshot.events == (CacheCleared(), windowed)
    message = to_message(snapshot)
    assert [event.group for event in message.events] == [0, 1]
    feed.publish([BlockRemoved(name(1), 1)])
    (snapshot,) = await batches(feed, None, 1)
    assert snapshot.events == (CacheCleared(),)


async def test_an_empty_index_is_a_snapshot_too() -> None:
    (snapshot,) = await batches(KvEventFeed(10, FIRST), None, 1)
    assert snapshot == KvEventBatch(FIRST, (CacheCleared(),), snapshot=True)


async def test_kept_events_are_replayed_from_a_number() -> None:
    feed = KvEventFeed(10, FIRST)
    events: list[KvEvent] = [stored(1), stored(2), removed(1)]
    feed.publish(events)
    for start in range(3):
        (batch,) = await batches(feed, FIRST + start, 1)
        assert batch == KvEventBatch(FIRST + start, tuple(events[start:]), snapshot=False)


@pytest.mark.parametrize("start", [0, FIRST - 1, FIRST, FIRST + 1, FIRST + 6, 2**64 - 1])
async def test_what_is_not_kept_or_not_here_gives_a_snapshot(start: int) -> None:
    feed = KvEventFeed(3, FIRST)
    feed.publish([stored(number) for number in range(5)])
    (batch,) = await batches(feed, start, 1)
    assert batch.snapshot
    assert batch.number == FIRST + 5


async def test_a_subscriber_that_has_all_waits_for_the_next_event() -> None:
    feed = KvEventFeed(10, FIRST)
    feed.publish([stored(1)])
    async with aclosing(feed.follow(FIRST + 1)) as following:
        waiting = asyncio.ensure_future(anext(following))
        await asyncio.sleep(0)
        feed.publish([])
        await asyncio.sleep(0)
        assert not waiting.done()
        feed.publish([removed(1)])
        async with asyncio.timeout(5):
            batch = await waiting
        assert batch == KvEventBatch(FIRST + 1, (removed(1),), snapshot=False)


async def test_a_reader_that_falls_behind_what_is_kept_is_told() -> None:
    feed = KvEventFeed(3, FIRST)
    async with aclosing(feed.follow(None)) as following:
        assert (await anext(following)).snapshot
        feed.publish([stored(number) for number in range(3)])
        assert len((await anext(following)).events) == 3
        feed.publish([stored(number) for number in range(4, 8)])
        with pytest.raises(SlowReaderError, match="subscribe anew"):
            await anext(following)


async def test_large_snapshots_come_in_parts_of_one_number() -> None:
    feed = KvEventFeed(10, FIRST)
    feed.publish([stored(*range(40), size=2048), stored(99)])
    parts = await batches(feed, None, 2)
    assert [part.number for part in parts] == [FIRST + 2] * 2
    assert sum(len(part.events) for part in parts) == 1 + 41
    assert max(len(event.token_ids) for part in parts for event in part.events[1:]) == 8192  # type: ignore[union-attr]


turns = st.lists(st.lists(st.integers(0, 5), max_size=4), min_size=1, max_size=12)


@settings(deadline=None, max_examples=60)
@given(turns=turns, max_events=st.integers(1, 8), stops=st.lists(st.booleans(), max_size=12))
def test_numbers_have_no_gaps_however_readers_come_and_go(
    turns: list[list[int]], max_events: int, stops: list[bool]
) -> None:
    """A reader that leaves comes back with the number behind the last event it saw."""

    async def play() -> None:
        feed = KvEventFeed(max_events, FIRST)
        index: set[BlockHash] = set()
        seen: set[BlockHash] = set()
        number: int | None = None
        following = feed.follow(number)
        for turn, flips in enumerate(turns):
            events: list[KvEvent] = []
            for flip in flips:
                events.append(removed(flip) if name(flip) in index else stored(flip))
                index ^= {name(flip)}
            feed.publish(events)
            if turn < len(stops) and stops[turn]:
                await following.aclose()
                following = feed.follow(number)
            while number != feed.next_number:
                try:
                    batch = await anext(following)
                except SlowReaderError:
                    following = feed.follow(None)
                    continue
                assert batch.snapshot or batch.number == number
                for event in batch.events:
                    match event:
                        case BlocksStored():
                            seen.update(event.names)
                        case BlockRemoved():
                            seen.remove(event.name)
                        case CacheCleared():
                            seen.clear()
                number = batch.number + (0 if batch.snapshot else len(batch.events))
            assert seen == index
        await following.aclose()

    asyncio.run(play())
