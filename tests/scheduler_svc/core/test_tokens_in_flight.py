"""A preempted request and its token that is still on its way."""

from fake_worker import generate_alone
from scheduler_bench import Bench, bench, request
from scheduler_svc.core.departure import preempt
from scheduler_svc.core.request import Request


def preempted_in_flight() -> tuple[Bench, Request, Request]:
    """Return two requests, of which the second has lost its blocks with a token on its way.

    Three steps may be in flight, so that there is a turn before the token is there.
    """
    table = bench(10, budget=100, length=40, depth=3)
    first, second = request("a", [0] * 19, 20), request("b", [1] * 19, 20)
    table.send(first, second)
    while not second.num_preemptions:
        if table.plan() is None:
            table.answer()
    while second.num_pending_tokens > 1:
        table.answer()
    assert second.num_pending_tokens == 1
    return table, first, second


def test_it_waits_for_the_token_though_there_is_room() -> None:
    table, first, second = preempted_in_flight()
    table.scheduler.abort(first, table.now_ns)
    assert table.plan() is None
    assert table.scheduler.num_in_flight < 3
    table.run()
    assert second.output_token_ids().tolist() == generate_alone([1] * 19, 20, frozenset())


def test_it_does_not_wait_for_a_token_that_was_lost() -> None:
    table, first, second = preempted_in_flight()
    table.scheduler.lose_worker(table.now_ns)
    table.wire.clear()
    table.scheduler.rejoin(table.now_ns)
    table.run()
    for each, token in ((first, 0), (second, 1)):
        alone = generate_alone([token] * 19, 20, frozenset())
        assert each.output_token_ids().tolist() == alone


def test_one_that_rests_on_a_failed_row_is_sampled_again() -> None:
    table = bench(64, depth=2)
    failing, reading = request("failing", [0] * 8 + [1]), request("reading", [0] * 8 + [1] * 9)
    table.send(failing, reading)
    plan = table.plan(frozenset({0}))
    assert plan is not None
    assert [row.num_computed_tokens for row in plan.admitted] == [0, 8]
    preempt(table.scheduler._state, reading, table.now_ns)
    assert reading.num_pending_tokens == 1
    outcome = table.answer()
    assert outcome.finished == [failing]
    assert outcome.requests == []
    table.run()
    alone = generate_alone([0] * 8 + [1] * 9, 4, frozenset())
    assert reading.output_token_ids().tolist() == alone
