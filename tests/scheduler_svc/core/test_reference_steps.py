"""Stops, plans ahead and counts do what the reference's scenarios 55 to 64 say.

Those of drafts (60 to 62), of repetition (57) and of connectors come with what they are about.
"""

from array import array

import numpy as np
import pytest

from fake_worker import generate_alone
from scheduler_bench import Bench, bench, limits, request
from scheduler_svc.core.request import FinishReason, Request, Sampling, Stopping
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step_plan import StepResult

EOS = 50
STOP_ID = 42


def told(stopping: Stopping, tokens: list[int]) -> Request:
    """Return a request whose worker says these tokens, as far as they are asked for."""
    table = bench(32)
    each = Request("x", array("i", [0]), Sampling(0.0), stopping)
    table.send(each)
    for token in tokens:
        if not table.scheduler.has_work:
            break
        plan = table.scheduler.schedule(0)
        assert plan is not None
        table.scheduler.apply(StepResult(plan.step_id, np.array([token], dtype=np.int32)), 0)
    return each


@pytest.mark.parametrize(
    ("stopping", "tokens", "output", "reason", "stop_id"),
    [
        (Stopping(9, frozenset({EOS})), [10, EOS, 11], [10, EOS], FinishReason.STOP, None),
        (
            Stopping(9, frozenset({EOS}), frozenset({STOP_ID})),
            [10, STOP_ID, 12],
            [10, STOP_ID],
            FinishReason.STOP,
            STOP_ID,
        ),
        (Stopping(2, frozenset({EOS})), [10, 11, 12], [10, 11], FinishReason.LENGTH, None),
        (Stopping(3), [EOS, 10, 11], [EOS, 10, 11], FinishReason.LENGTH, None),
        # The last token allowed is an end as well: it counts as stopped.
        (Stopping(2, frozenset({EOS})), [10, EOS], [10, EOS], FinishReason.STOP, None),
    ],
)
def test_55_what_ends_an_output(
    stopping: Stopping,
    tokens: list[int],
    output: list[int],
    reason: FinishReason,
    stop_id: int | None,
) -> None:
    each = told(stopping, tokens)
    assert each.output_token_ids().tolist() == output
    assert each.finish_reason is reason
    assert each.stop_token_id == stop_id


@pytest.mark.parametrize("end", [EOS, STOP_ID])
@pytest.mark.parametrize(("num_tokens", "ends"), [(3, False), (4, False), (5, True), (9, True)])
def test_56_no_end_counts_before_the_least_output(end: int, num_tokens: int, ends: bool) -> None:
    stopping = Stopping(20, frozenset({EOS}), frozenset({STOP_ID}), min_output_tokens=5)
    each = told(stopping, [10] * (num_tokens - 1) + [end])
    assert (each.finish_reason is FinishReason.STOP) == ends


def test_56_the_least_output_does_not_lift_the_longest() -> None:
    each = told(Stopping(2, frozenset({EOS}), min_output_tokens=2), [EOS, 10, 11])
    assert each.output_token_ids().tolist() == [EOS, 10]
    assert each.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("max_output", [1, 2, 3, 5])
def test_58_plans_ahead_hold_no_token_too_many(max_output: int) -> None:
    table = bench(32, depth=2)
    table.send(request("x", [0] * 9, max_output))
    planned = []
    while table.scheduler.has_work:
        while (plan := table.plan()) is not None:
            planned.append(plan.num_tokens)
        table.answer()
    assert sum(planned) == 9 + max_output - 1
    assert len(planned) == max_output


def test_58a_a_token_on_its_way_is_counted_apart() -> None:
    table = bench(32, budget=200, length=200, depth=2)
    each = request("x", [0] * 100, 2)
    table.send(each)
    rows = table.scheduler._state.rows
    pending = []
    for _ in range(2):
        table.plan()
        pending.append((int(rows.num_computed[0]), int(rows.num_pending[0])))
    table.answer()
    pending.append((int(rows.num_computed[0]), int(rows.num_pending[0])))
    assert pending == [(100, 1), (101, 2), (101, 1)]
    table.answer()
    assert each.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_taken", [0, 1, 3])
def test_59_an_aborted_request_has_what_came_before(depth: int, num_taken: int) -> None:
    table = bench(32, depth=depth)
    each, other = request("x", [0, 1], 9), request("other", [1, 1], 9)
    table.send(each, other)
    outcomes = 0
    while outcomes < num_taken:
        table.turn()
        outcomes += 1
    while table.plan() is not None:
        pass
    table.scheduler.abort(each, table.now_ns)
    while table.scheduler.has_work:
        outcome = table.turn()
        assert outcome is not None
        assert each not in outcome.requests
    assert each.output_token_ids().tolist() == generate_alone([0, 1], num_taken, frozenset())
    assert other.output_token_ids().tolist() == generate_alone([1, 1], 9, frozenset())


def test_63_who_did_not_fit_at_first_is_counted_once() -> None:
    table = Bench(Scheduler(limits(100, rows=8, length=200, block_size=16)), 6)
    table.send(request("before", [1] * 48, 1))
    table.run()
    before = (table.scheduler.counters.prefix_queries, table.scheduler.counters.prefix_hits)
    holder = request("holder", [2] * 60, 4)
    each = request("x", [1] * 48, 1)
    table.send(holder)
    table.plan()
    table.send(each)
    for _ in range(3):
        table.turn()
        assert each.first_scheduled_ns is None or holder.finish_reason is not None
    table.run()
    after = (table.scheduler.counters.prefix_queries, table.scheduler.counters.prefix_hits)
    assert after[0] - before[0] == 60 + 48
    assert after[1] - before[1] == each.num_cached_tokens


def test_64_a_resumed_request_is_not_counted_again() -> None:
    table = bench(10, budget=100, length=40)
    requests = [request("a", [0] * 19, 20), request("b", [1] * 19, 20)]
    table.send(*requests)
    table.run()
    counters = table.scheduler.counters
    assert counters.preemptions >= 1
    assert counters.prefix_queries == counters.prompt_tokens == 2 * 19
    unnamed = Bench(Scheduler(limits(), enable_prefix_caching=False), 8)
    unnamed.send(request("x", [0] * 9))
    unnamed.run()
    counters = unnamed.scheduler.counters
    assert (counters.prefix_queries, counters.prefix_hits) == (0, 0)
