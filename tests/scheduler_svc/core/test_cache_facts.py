"""Hits, queries and reasons of misses are counted once per request, by the scenarios' numbers."""

import pytest

from scheduler_bench import BLOCK_SIZE, Bench, bench, limits, request
from scheduler_svc.core.hit_rate import HitRateWindow
from scheduler_svc.core.miss_reason import MissReason
from scheduler_svc.core.request import Request
from scheduler_svc.core.scheduler import Scheduler


def totals(table: Bench) -> tuple[int, int, int]:
    """Return requests in the window of the hit rate, tokens looked up, and tokens found."""
    counters = table.scheduler.counters
    misses = sum(counters.prefix_misses.values())
    assert counters.prefix_queries == counters.prefix_hits + misses
    window = table.scheduler._state.prefixes.hit_rate
    return window.num_requests, counters.prefix_queries, counters.prefix_hits


def run(table: Bench, prompt: list[int], max_output: int = 1, salt: bytes = b"") -> Request:
    each = request("x", prompt, max_output, salt=salt)
    table.send(each)
    table.run()
    return each


def test_32_the_hit_rate_is_that_of_the_latest_requests() -> None:
    window = HitRateWindow(5)
    for num_requests, queries, hits, rate in (
        (1, 20, 9, 0.45),
        (4, 80, 16, 0.25),
        (1, 10, 2, 0.2),
        (0, 7, 7, 0.2),
    ):
        window.observe(queries, hits, num_requests)
        assert window.rate == rate


def test_33_the_newest_observation_is_kept_however_large() -> None:
    window = HitRateWindow(5)
    assert window.rate == 0
    window.observe(20, 10, 11)
    assert window.rate == 0.5
    window.observe(40, 30, 22)
    assert window.rate == 0.75


def test_63_a_request_that_did_not_fit_at_first_is_counted_once() -> None:
    table = bench(8, rows=2, budget=64)
    prompt = [1] * (3 * BLOCK_SIZE)
    run(table, prompt)
    before = totals(table)
    table.send(request("big", [2] * (6 * BLOCK_SIZE), 8))
    table.plan()
    late = request("late", prompt, 1)
    table.send(late)
    for _ in range(3):
        table.turn()
        assert late.first_scheduled_ns is None
    table.run()
    requests, queries, hits = totals(table)
    found = late.num_cached_tokens
    assert (requests, queries) == (before[0] + 2, before[1] + 9 * BLOCK_SIZE)
    assert hits == before[2] + found


def test_64_a_preempted_request_is_counted_at_its_first_admission_only() -> None:
    table = bench(6, rows=2)
    table.send(request("a", [1] * 8, 12), request("b", [2] * 8, 12))
    table.run()
    assert table.scheduler.counters.preemptions > 0
    assert totals(table)[:2] == (2, 16)


def test_64_nothing_is_counted_with_caching_off() -> None:
    table = Bench(Scheduler(limits(), enable_prefix_caching=False), 8)
    assert run(table, [1] * 8).miss_reason is MissReason.DISABLED
    assert totals(table) == (0, 0, 0)


def test_nothing_is_counted_for_a_request_that_reads_no_cache() -> None:
    table = bench()
    each = request("x", [1] * 8, 1)
    each.read_cache = False
    table.send(each)
    table.run()
    assert each.miss_reason is MissReason.NOT_READ
    assert totals(table) == (0, 0, 0)


def test_what_ended_a_hit_is_told() -> None:
    table = bench(8)
    prompt = [1] * (2 * BLOCK_SIZE)
    assert run(table, prompt).miss_reason is MissReason.UNSEEN
    assert run(table, prompt).miss_reason is MissReason.LAST_TOKEN
    assert run(table, [*prompt, 5]).miss_reason is MissReason.TAIL
    assert run(table, prompt, salt=b"other").miss_reason is MissReason.UNSEEN
    assert run(table, [*prompt, *([3] * BLOCK_SIZE)]).miss_reason is MissReason.UNSEEN
    run(table, [7] * (8 * BLOCK_SIZE - 1))
    assert run(table, prompt).miss_reason is MissReason.EVICTED


def test_a_prompt_below_a_block_misses_nothing_that_could_be_hit() -> None:
    assert run(bench(), [1, 2]).miss_reason is MissReason.TAIL


def test_an_eviction_is_forgotten_when_a_pool_full_of_others_has_followed() -> None:
    table = bench(4)
    prompt = [1] * (2 * BLOCK_SIZE)
    run(table, prompt)
    for number in range(3):
        run(table, [10 + number] * (4 * BLOCK_SIZE))
    assert run(table, prompt).miss_reason is MissReason.UNSEEN


def test_a_flushed_name_counts_as_unseen() -> None:
    table = bench(4)
    run(table, [1] * 8)
    table.scheduler.flush_cache()
    assert run(table, [1] * 8).miss_reason is MissReason.UNSEEN


def test_a_flush_forgets_what_was_evicted_before() -> None:
    table = bench(4)
    run(table, [1] * 8)
    run(table, [2] * 16)
    table.scheduler.flush_cache()
    assert run(table, [1] * 8).miss_reason is MissReason.UNSEEN


@pytest.mark.parametrize("read", [True, False])
def test_misses_are_counted_in_tokens_by_reason(read: bool) -> None:
    table = bench()
    for prompt in ([1] * 8, [1] * 8, [1] * 9):
        each = request("x", prompt, 1)
        each.read_cache = read
        table.send(each)
        table.run()
    expected = {MissReason.UNSEEN: 8, MissReason.LAST_TOKEN: 4, MissReason.TAIL: 1}
    assert table.scheduler.counters.prefix_misses == (expected if read else {})
