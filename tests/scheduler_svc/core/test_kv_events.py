"""Whoever follows the events has the index, name for name, at every moment."""

from array import array
from contextlib import suppress
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_worker import FakeWorker
from kv_replica import KvReplica
from scheduler_bench import BLOCK_SIZE, ROOT, Bench, limits, request
from scheduler_svc.core.block_hash import Adapter, BlockHash, ExtraKeys
from scheduler_svc.core.errors import RequestError
from scheduler_svc.core.eviction import EVICTION_POLICIES
from scheduler_svc.core.hash_algorithms import SHA256
from scheduler_svc.core.kv_events import (
    BlockRemoved,
    BlocksStored,
    CacheCleared,
    KvEvent,
    KvEventLog,
)
from scheduler_svc.core.kv_memory import KvMemory
from scheduler_svc.core.request import Request, Sampling, Stopping
from scheduler_svc.core.scheduler import Scheduler

SALTS = (b"", b"pepper")


def event_bench(
    num_blocks: int, *, depth: int = 1, policy: str = "lru", budget: int = 64, share: float = 0.0
) -> Bench:
    memory = KvMemory(EVICTION_POLICIES[policy], events=KvEventLog(), max_pinned_share=share)
    scheduler = Scheduler(limits(budget, depth=depth, length=128), memory=memory)
    table = Bench(scheduler, num_blocks)
    assert take(table) == [CacheCleared()]
    return table


def take(table: Bench) -> list[KvEvent]:
    events = table.scheduler._memory.events
    assert events is not None
    return events.take()


def names_of(prompt: list[int]) -> list[BlockHash]:
    return SHA256.hash_full_blocks(memoryview(array("i", prompt)), BLOCK_SIZE, ROOT)


def packed(prompt: list[int]) -> bytes:
    return array("i", prompt).tobytes()


def run(table: Bench, prompt: list[int]) -> None:
    table.send(request("x", prompt, 1))
    table.run()


@pytest.mark.parametrize("count", [2, 3, 10])
def test_43_blocks_of_one_step_are_one_event(count: int) -> None:
    table = event_bench(count)
    prompt = list(range(count * BLOCK_SIZE))
    run(table, prompt)
    names = tuple(names_of(prompt))
    stored = BlocksStored(names, BlockHash(b""), packed(prompt), BLOCK_SIZE, "")
    assert take(table) == [stored]
    assert take(table) == []


@pytest.mark.parametrize("count", [2, 3, 10])
def test_44_evicted_names_are_removed_before_new_ones_are_stored(count: int) -> None:
    table = event_bench(count)
    old, new = [1] * (count * BLOCK_SIZE), [2] * (count * BLOCK_SIZE)
    run(table, old)
    take(table)
    run(table, new)
    *removed, stored = take(table)
    # The last block of a prefix dies first.
    assert removed == [BlockRemoved(name) for name in reversed(names_of(old))]
    assert isinstance(stored, BlocksStored)
    assert stored.names == tuple(names_of(new))


def test_45_a_flush_is_one_event() -> None:
    table = event_bench(8)
    run(table, [1] * (3 * BLOCK_SIZE))
    take(table)
    table.scheduler.flush_cache()
    assert take(table) == [CacheCleared()]


def test_46_the_parent_is_the_one_in_the_chain_whatever_block_holds_it() -> None:
    table = event_bench(8, budget=2 * BLOCK_SIZE)
    prompt = list(range(4 * BLOCK_SIZE))
    run(table, prompt)
    names = names_of(prompt)
    first, second = take(table)
    assert isinstance(first, BlocksStored)
    assert isinstance(second, BlocksStored)
    assert (first.parent, second.parent) == (b"", names[1])
    assert second.names == tuple(names[2:])
    assert second.token_ids == packed(prompt[2 * BLOCK_SIZE :])


def test_47_the_adapters_name_is_told() -> None:
    table = event_bench(8)
    each = Request(
        "a",
        array("i", [1] * 5),
        Sampling(0.0),
        Stopping(1),
        extra=ExtraKeys(adapter=Adapter("poet", 3)),
    )
    table.send(each)
    table.run()
    (stored,) = take(table)
    assert isinstance(stored, BlocksStored)
    assert stored.adapter == "poet"


def test_48_hits_are_not_told_again() -> None:
    table = event_bench(8)
    prompt = [1] * (2 * BLOCK_SIZE)
    run(table, [*prompt, 5])
    take(table)
    run(table, [*prompt, 5])
    assert take(table) == []


def test_a_name_that_two_blocks_have_is_told_once_and_removed_with_the_last() -> None:
    table = event_bench(4)
    prompt = [1] * BLOCK_SIZE
    run(table, prompt)
    run(table, prompt)
    assert [type(event) for event in take(table)] == [BlocksStored]
    # The last token of a prompt runs again, into a block of its own: now two have the name.
    run(table, [2] * (3 * BLOCK_SIZE))
    assert not any(isinstance(event, BlockRemoved) for event in take(table))
    run(table, [3] * (4 * BLOCK_SIZE - 1))
    removed = [event for event in take(table) if isinstance(event, BlockRemoved)]
    assert removed.count(BlockRemoved(names_of(prompt)[0])) == 1


def test_new_names_with_an_old_one_between_are_two_events() -> None:
    prompt = list(range(4 * BLOCK_SIZE))
    names, log = names_of(prompt), KvEventLog()
    log.add_stored(names, [0, 2, 3], memoryview(array("i", prompt)), BLOCK_SIZE, "")
    first, second = log.take()
    assert isinstance(first, BlocksStored)
    assert isinstance(second, BlocksStored)
    assert (first.names, first.parent) == ((names[0],), b"")
    assert (second.names, second.parent) == ((names[2], names[3]), names[1])
    assert second.token_ids == packed(prompt[2 * BLOCK_SIZE :])


def test_a_retracted_name_is_removed() -> None:
    table = event_bench(8)
    table.send(request("x", [1] * (2 * BLOCK_SIZE + 1), 4))
    assert table.plan() is not None
    assert [type(event) for event in take(table)] == [BlocksStored]
    table.wire.clear()
    table.scheduler.lose_worker(table.now_ns)
    removed = {event.name for event in take(table) if isinstance(event, BlockRemoved)}
    assert removed == set(names_of([1] * (2 * BLOCK_SIZE)))


def test_a_worker_with_an_empty_cache_clears_the_index() -> None:
    table = event_bench(8)
    run(table, [1] * (2 * BLOCK_SIZE))
    take(table)
    table.scheduler.start_epoch(8, ROOT, table.now_ns)
    assert take(table) == [CacheCleared()]


def test_nothing_is_collected_if_nobody_listens() -> None:
    table = Bench(Scheduler(limits()), 8)
    run(table, [1] * (2 * BLOCK_SIZE))
    assert table.scheduler.pool is not None
    assert table.scheduler.pool.events is None


@dataclass
class Happening:
    """Something that happens before a turn."""

    kind: str
    number: int


happenings = st.builds(
    Happening,
    st.sampled_from(["add"] * 6 + ["abort", "flush", "lose", "new_worker", "pin", "fail", "none"]),
    st.integers(0, 7),
)


@settings(deadline=None, max_examples=120)
@given(
    script=st.lists(happenings, min_size=1, max_size=30),
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=24), min_size=8, max_size=8),
    num_blocks=st.integers(8, 16),
    depth=st.integers(1, 2),
    policy=st.sampled_from(sorted(EVICTION_POLICIES)),
    budget=st.integers(4, 40),
)
def test_a_replica_made_of_events_equals_the_index_at_every_moment(
    script: list[Happening],
    prompts: list[list[int]],
    num_blocks: int,
    depth: int,
    policy: str,
    budget: int,
) -> None:
    table = event_bench(num_blocks, depth=depth, policy=policy, budget=budget, share=0.25)
    scheduler = table.scheduler
    replica = KvReplica(SHA256, ROOT, SALTS)

    def compare() -> None:
        replica.apply(take(table))
        assert scheduler.pool is not None
        assert replica.names.keys() == scheduler.pool._index.keys()

    requests: list[Request] = []
    for what in [*script, *[Happening("none", 0)] * 200]:
        if requests and what.kind == "none" and not scheduler.has_work and not table.wire:
            continue
        match what.kind:
            case "add":
                name, salt = str(len(requests)), SALTS[what.number % 2]
                requests.append(request(name, prompts[what.number], 1 + what.number, salt=salt))
                with suppress(RequestError):
                    table.send(requests[-1])
            case "abort" if requests:
                aborted = requests[what.number % len(requests)]
                if aborted.key in scheduler._state.live:
                    scheduler.abort(aborted, table.now_ns)
            case "flush":
                scheduler.flush_cache()
            case "lose" | "new_worker":
                table.wire.clear()
                scheduler.lose_worker(table.now_ns)
                compare()
                if what.kind == "lose":
                    scheduler.rejoin(table.now_ns)
                else:
                    table.worker = FakeWorker(BLOCK_SIZE, num_blocks)
                    scheduler.start_epoch(num_blocks, ROOT, table.now_ns)
            case "pin":
                with suppress(RequestError):
                    tokens = array("i", prompts[what.number])
                    scheduler.pin(tokens, ExtraKeys(), table.now_ns + 20)
        compare()
        failing = frozenset({what.number % 4}) if what.kind == "fail" else frozenset()
        while table.plan(failing) is not None:
            compare()
        if table.wire:
            table.answer()
            compare()
    assert not scheduler.has_work
