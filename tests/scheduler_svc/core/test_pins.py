"""A pinned prefix stays, within the quota and for its time, and nobody waits for it in vain."""

from array import array

import pytest

from fake_worker import FakeWorker
from scheduler_bench import BLOCK_SIZE, ROOT, Bench, limits, request
from scheduler_svc.core.block_hash import ExtraKeys
from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.errors import (
    NeverFitsError,
    PinQuotaError,
    PrefixNotCachedError,
    RequestError,
    UnavailableError,
)
from scheduler_svc.core.kv_memory import KvMemory
from scheduler_svc.core.pins import EndedPin, PinEnd, Pins
from scheduler_svc.core.request import FinishReason, Request
from scheduler_svc.core.scheduler import Scheduler

PREFIX = [1] * (3 * BLOCK_SIZE)
LATER_NS = 1_000_000


def pin_bench(num_blocks: int = 12, share: float = 0.25, *, depth: int = 1) -> Bench:
    memory = KvMemory(max_pinned_share=share)
    return Bench(Scheduler(limits(depth=depth), memory=memory), num_blocks)


def run(table: Bench, prompt: list[int], max_output: int = 1, salt: bytes = b"") -> Request:
    each = request("x", prompt, max_output, salt=salt)
    table.send(each)
    table.run()
    return each


def pin(table: Bench, tokens: list[int], expires_ns: int = LATER_NS, salt: bytes = b"") -> int:
    found = table.scheduler.pin(array("i", tokens), ExtraKeys(salt), expires_ns)
    assert len(found.blocks) <= len(tokens) // BLOCK_SIZE
    return found.number


def pool_of(table: Bench) -> BlockPool:
    assert table.scheduler.pool is not None
    return table.scheduler.pool


def scan(table: Bench) -> None:
    """Use all the memory that is not pinned, twice."""
    for number in range(6):
        run(table, [50 + number] * (8 * BLOCK_SIZE))


def ended(table: Bench) -> list[EndedPin]:
    return table.scheduler._memory.pins.take_ended()


def test_a_pinned_prefix_outlives_whatever_wants_its_memory() -> None:
    table = pin_bench()
    run(table, [*PREFIX, 5])
    number = pin(table, PREFIX)
    assert (pool_of(table).num_pinned, pool_of(table).num_free) == (3, 9)
    scan(table)
    assert run(table, [*PREFIX, 6]).num_cached_tokens == len(PREFIX)
    assert table.scheduler.unpin(number)
    assert not table.scheduler.unpin(number)
    scan(table)
    assert run(table, [*PREFIX, 6]).num_cached_tokens == 0
    assert ended(table) == [EndedPin(number, PinEnd.UNPINNED)]


def test_blocks_in_use_are_pinned_too_and_stay_when_their_user_leaves() -> None:
    table = pin_bench()
    user = request("x", [*PREFIX, 5], 8)
    table.send(user)
    table.turn()
    pin(table, PREFIX)
    table.scheduler.abort(user, table.now_ns)
    table.scheduler.check()
    assert (pool_of(table).num_used, pool_of(table).num_free) == (0, 9)
    scan(table)
    assert run(table, [*PREFIX, 6]).num_cached_tokens == len(PREFIX)


def test_a_pin_ends_when_its_time_is_over() -> None:
    table = pin_bench()
    run(table, [*PREFIX, 5])
    number = pin(table, PREFIX, expires_ns=5000)
    table.now_ns = 4990
    run(table, [9])
    assert ended(table) == []
    table.now_ns = 5000
    assert table.scheduler.schedule(table.now_ns) is None
    assert ended(table) == [EndedPin(number, PinEnd.EXPIRED)]
    assert pool_of(table).num_free == 12
    # It is idle as any other prefix, its end first to die.
    run(table, [9] * (9 * BLOCK_SIZE - 1))
    run(table, [8] * (2 * BLOCK_SIZE - 1))
    assert run(table, [*PREFIX, 6]).num_cached_tokens == 2 * BLOCK_SIZE


def test_only_what_is_cached_is_pinned() -> None:
    table = pin_bench(12, 0.5)
    run(table, [*PREFIX, 5])
    found = table.scheduler.pin(array("i", [*PREFIX, 7, 7, 7, 7, 7]), ExtraKeys(), LATER_NS)
    assert len(found.blocks) == 3
    with pytest.raises(PrefixNotCachedError):
        pin(table, [7] * 8)
    with pytest.raises(PrefixNotCachedError):
        pin(table, PREFIX, salt=b"other")
    with pytest.raises(PrefixNotCachedError):
        pin(table, PREFIX[: BLOCK_SIZE - 1])


def test_the_salt_says_whose_prefix_is_pinned() -> None:
    table = pin_bench()
    run(table, [*PREFIX, 5], salt=b"mine")
    pin(table, PREFIX, salt=b"mine")
    scan(table)
    assert run(table, [*PREFIX, 5], salt=b"mine").num_cached_tokens == len(PREFIX)


def test_the_quota_counts_each_block_once() -> None:
    table = pin_bench()
    run(table, [*PREFIX, 5])
    run(table, [2] * (2 * BLOCK_SIZE))
    numbers = [pin(table, PREFIX[: n * BLOCK_SIZE]) for n in (1, 3)]
    with pytest.raises(PinQuotaError, match="with 2 more, 5 blocks would be pinned, at most 3"):
        pin(table, [2] * (2 * BLOCK_SIZE))
    pin(table, PREFIX)
    with pytest.raises(PinQuotaError, match="there are 3 pins"):
        pin(table, PREFIX)
    assert pool_of(table).num_pinned == 3
    table.scheduler.unpin(numbers[1])
    assert pool_of(table).num_pinned == 3


def test_without_a_quota_without_a_cache_and_without_a_worker_nothing_is_pinned() -> None:
    table = pin_bench(share=0)
    run(table, [*PREFIX, 5])
    with pytest.raises(PinQuotaError, match="at most 0 may: see max_pinned_share"):
        pin(table, PREFIX)
    off = Bench(Scheduler(limits(), enable_prefix_caching=False), 12)
    with pytest.raises(RequestError, match="prefix caching is off"):
        pin(off, PREFIX)
    with pytest.raises(UnavailableError):
        Scheduler(limits()).pin(array("i", PREFIX), ExtraKeys(), LATER_NS)


def test_what_can_never_fit_is_told_by_the_pool_less_the_quota() -> None:
    table = pin_bench()
    # 9 blocks hold 36 tokens; the last token is never stored.
    table.scheduler.add(request("fits", [1] * 30, 7), 0)
    with pytest.raises(NeverFitsError, match="the pool less what may be pinned has 36"):
        table.scheduler.add(request("never", [1] * 30, 8), 0)
    assert request_limit(table, [1] * 30) == 37


def request_limit(table: Bench, prompt: list[int]) -> int:
    """Return where a request of open length ends."""
    each = request("open", prompt, None)
    table.scheduler.add(each, 0)
    return each.limit


def test_the_largest_request_fits_beside_a_full_quota_of_pins() -> None:
    table = pin_bench()
    run(table, [*PREFIX, 5])
    pin(table, PREFIX)
    each = run(table, [2] * 30, 7)
    assert each.finish_reason is FinishReason.LENGTH
    assert table.scheduler.num_broken_pins == 0


def test_the_oldest_pin_is_broken_when_nothing_could_go_on_otherwise() -> None:
    table = pin_bench(share=0.75)
    numbers = []
    for token in (1, 2, 3):
        run(table, [token] * (3 * BLOCK_SIZE))
        numbers.append(pin(table, [token] * (2 * BLOCK_SIZE)))
    # As if the quota had been smaller when the request was let in: it needs 8 blocks of 12.
    pins = table.scheduler._memory.pins
    pins.max_blocks = 0
    each = run(table, [9] * (8 * BLOCK_SIZE - 1))
    assert each.finish_reason is FinishReason.LENGTH
    assert ended(table) == [EndedPin(numbers[0], PinEnd.BROKEN)]
    assert table.scheduler.num_broken_pins == 1
    assert pool_of(table).num_pinned == 4


def test_pins_are_lost_with_the_workers_process() -> None:
    table = pin_bench()
    run(table, [*PREFIX, 5])
    number = pin(table, PREFIX)
    table.worker = FakeWorker(BLOCK_SIZE, 12)
    table.scheduler.start_epoch(12, ROOT, table.now_ns)
    assert ended(table) == [EndedPin(number, PinEnd.LOST)]
    assert (pool_of(table).num_pinned, pool_of(table).num_free) == (0, 12)
    # Numbers are not given twice, so that the old one ends nobody else's pin.
    run(table, [*PREFIX, 5])
    assert pin(table, PREFIX) != number
    assert not table.scheduler.unpin(number)


def test_a_kept_cache_keeps_pins_of_confirmed_blocks_and_cuts_the_others() -> None:
    table = pin_bench(12, 0.5)
    run(table, [*PREFIX, 5])
    table.send(request("more", [*PREFIX, *([2] * (2 * BLOCK_SIZE)), 3], 4))
    table.send(request("new", [4] * (BLOCK_SIZE + 1), 4))
    assert table.plan() is not None
    long = pin(table, [*PREFIX, *([2] * (2 * BLOCK_SIZE))])
    short = pin(table, [4] * BLOCK_SIZE)
    assert pool_of(table).num_pinned == 6
    # The step that writes the last two blocks of one, and all of the other, is lost.
    table.wire.clear()
    table.scheduler.lose_worker(table.now_ns)
    table.scheduler.check()
    table.scheduler.rejoin(table.now_ns)
    assert ended(table) == [EndedPin(short, PinEnd.RETRACTED)]
    assert pool_of(table).num_pinned == 3
    table.run()
    assert table.scheduler.unpin(long)


def test_a_flush_ends_all_pins() -> None:
    table = pin_bench()
    run(table, [*PREFIX, 5])
    number = pin(table, PREFIX)
    assert table.scheduler.flush_cache() == 3
    assert ended(table) == [EndedPin(number, PinEnd.FLUSHED)]
    assert pool_of(table).num_empty == 12


def test_the_next_pin_to_end_is_known() -> None:
    pins = Pins(4)
    assert pins.next_expiry_ns is None
    table = pin_bench(12, 0.5)
    run(table, [*PREFIX, 5])
    pin(table, PREFIX, 900)
    pin(table, PREFIX, 700)
    assert table.scheduler._memory.pins.next_expiry_ns == 700
