"""Scheduling under each policy does what the reference's scenarios say, by their numbers.

Where we differ on purpose, docs/adr/0015-policies.md says why.
"""

import pytest

from fake_worker import generate_alone
from scheduler_bench import Bench, bench, request
from scheduler_svc.core.errors import QueueFullError
from scheduler_svc.core.request import Request
from scheduler_svc.core.step_plan import StepPlan


def wide(num_blocks: int, policy: str = "fcfs", **limit: int) -> Bench:
    """Blocks of 16 tokens, as in the scenarios."""
    return bench(num_blocks, policy, "cheapest", length=2048, block_size=16, **limit)


def fresh(count: int, length: int) -> list[Request]:
    return [request(str(i), [i] * length, 50) for i in range(count)]


def planned(table: Bench) -> dict[str, int]:
    """Plan a step, take its answer, and return the tokens of each request in it."""
    plan = table.plan()
    assert plan is not None
    counts = tokens_of(table, plan)
    table.answer()
    return counts


def tokens_of(table: Bench, plan: StepPlan) -> dict[str, int]:
    rows = table.worker.rows
    names = {row: table.scheduler._state.rows.owner(row).request_id for row in rows}
    return {names[row]: state.num_new for row, state in sorted(rows.items()) if state.num_new}


def names(requests: list[Request]) -> list[str]:
    return [each.request_id for each in requests]


def run_names(table: Bench) -> list[str]:
    return names(table.scheduler._state.rows.running)


def wait_names(table: Bench) -> list[str]:
    return names(list(table.scheduler._state.waiting))


def test_49_all_that_fits_runs_in_one_step() -> None:
    table = wide(100, rows=16, budget=1024)
    table.send(*fresh(10, 10))
    assert planned(table) == {str(i): 10 for i in range(10)}
    assert (table.scheduler.num_running, table.scheduler.num_waiting) == (10, 0)


def test_50_a_threshold_cuts_long_prefills() -> None:
    table = wide(1000, rows=16, budget=1024, long_prefill_token_threshold=400)
    table.send(*fresh(3, 800))
    steps = [list(planned(table).values()) for _ in range(3)]
    assert steps == [[400, 400, 224], [400, 400, 224], [1, 1, 352]]


def test_51_the_budget_is_cut_and_filled() -> None:
    table = wide(1000, rows=3, budget=1024)
    table.send(*(request(str(i), [i] * n, 9) for i, n in enumerate((800, 800, 10, 10))))
    assert planned(table) == {"0": 800, "1": 224}


def test_52_a_plan_ahead_takes_arrivals() -> None:
    table = wide(1000, rows=2, budget=1024, depth=2)
    first, second = fresh(2, 512)
    table.send(first)
    plans = [table.plan()]
    table.send(second)
    plans.append(table.plan())
    assert [len(plan.admitted) for plan in plans if plan] == [1, 1]
    assert plans[1] is not None
    assert tokens_of(table, plans[1]) == {"0": 1, "1": 512}


def test_53_a_preempted_request_gets_its_token_in_flight() -> None:
    table = wide(10, rows=2, budget=200, depth=2)
    first, second = fresh(2, 80)
    table.send(first, second)
    table.plan()
    plan = table.plan()
    assert plan is not None
    assert plan.num_preempted == 1
    assert wait_names(table) == ["1"]
    assert second.num_pending_tokens == 1
    table.answer()
    assert second.output_token_ids().tolist() == generate_alone([1] * 80, 1, frozenset())


def test_72_rows_go_to_better_priority() -> None:
    table = wide(100, "priority", rows=1)
    table.send(*(request(str(i), [i], 9, priority=p) for i, p in enumerate((3, 2, 0))))
    planned(table)
    assert (run_names(table), wait_names(table)) == (["2"], ["1", "0"])
    table = wide(100, "priority", rows=2)
    table.send(*(request(str(i), [i], 9, priority=p) for i, p in enumerate((3, 1, 2, 0))))
    planned(table)
    assert run_names(table) == ["3", "1"]


def test_73_growth_preempts_lower_priority() -> None:
    table = wide(5, "priority", rows=2)
    table.send(request("lo", [0] * 32, 9, priority=5))
    planned(table)
    table.send(request("hi", [1] * 32, 9))
    assert planned(table) == {"lo": 1, "hi": 32}
    assert table.scheduler.pool is not None
    assert table.scheduler.pool.num_used == 5
    assert planned(table) == {"hi": 1}
    assert wait_names(table) == ["lo"]


def test_74_the_preempted_resumes_with_all_it_knew() -> None:
    table = wide(4, "priority", rows=2)
    low, high = request("low", [0] * 30, 9, priority=5), request("high", [1] * 32, 3)
    table.send(low)
    planned(table)
    table.send(high)
    assert planned(table) == {"low": 1, "high": 32}
    assert planned(table) == {"high": 1}
    assert low.num_tokens == 32
    while high.finish_reason is None:
        planned(table)
    plan = table.plan()
    assert plan is not None
    assert len(plan.admitted[0].tokens) == 32
    table.run()
    assert low.output_token_ids().tolist() == generate_alone([0] * 30, 9, frozenset())


def test_75_enough_space_preempts_nothing() -> None:
    table = wide(100, "priority", rows=2)
    table.send(request("lo", [0] * 32, 9, priority=5))
    planned(table)
    table.send(request("hi", [1] * 32, 9))
    table.run()
    assert table.scheduler.counters.preemptions == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_better_priority_takes_a_row_and_is_the_last_admitted(depth: int) -> None:
    table = bench(64, "priority", rows=2, depth=depth)
    low = [request(f"low{i}", [i] * 6, 20, priority=5) for i in range(2)]
    table.send(*low)
    table.turn()
    high = request("high", [1, 0, 1], 4)
    table.send(high, request("other", [1, 1], 4, priority=6))
    while table.wire:
        table.answer()
    plan = table.plan()
    assert plan is not None
    assert plan.num_preempted == 1
    assert [row.request_id for row in plan.admitted] == ["high"]
    assert run_names(table) == ["high", "low0"]
    table.run()
    for each, prompt in ((low[0], [0] * 6), (low[1], [1] * 6)):
        assert each.output_token_ids().tolist() == generate_alone(prompt, 20, frozenset())
    assert low[1].num_preemptions == 1


def test_better_priority_takes_blocks_only_if_they_let_it_in() -> None:
    table = bench(8, "priority", rows=4)
    table.send(request("low", [0] * 12, 9, priority=5), request("equal", [1] * 12, 9))
    planned(table)
    table.send(request("large", [2] * 20, 1))
    planned(table)
    assert table.scheduler.counters.preemptions == 0
    table = bench(8, "priority", rows=4)
    table.send(request("low", [0] * 12, 9, priority=5), request("equal", [1] * 12, 9))
    planned(table)
    table.send(request("fits", [2] * 12, 1), request("small", [1], 1))
    assert planned(table) == {"fits": 12, "equal": 1}


def test_a_full_budget_is_no_reason_to_preempt() -> None:
    table = bench(64, "priority", rows=4, budget=8)
    table.send(request("low", [0] * 30, 9, priority=5))
    planned(table)
    table.send(request("high", [1] * 4, 9))
    assert planned(table) == {"low": 8}
    assert table.scheduler.counters.preemptions == 0


def large_behind_a_runner(**limit: int) -> Bench:
    """One that runs, one that does not fit beside it, and many small ones behind."""
    table = bench(10, "fcfs", "cheapest", rows=8, **limit)
    table.send(request("runs", [0] * 20, 8))
    planned(table)
    table.send(request("large", [1] * 24, 1))
    return table


def test_at_most_so_many_pass_one_that_does_not_fit() -> None:
    table = large_behind_a_runner(max_passes=2)
    small = [request(str(i), [1, i % 2], 1) for i in range(6)]
    table.send(*small)
    assert planned(table) == {"runs": 1, "0": 2, "1": 2}
    assert planned(table) == {"runs": 1}
    order = []
    while table.scheduler.has_work:
        order += [name for name in planned(table) if name not in order]
    assert order.index("large") < order.index("2")


def test_nobody_passes_after_a_while() -> None:
    table = large_behind_a_runner(max_pass_ns=3)
    for i in range(4):
        table.send(request(str(i), [1, i % 2], 1))
    assert planned(table) == {"runs": 1, "0": 2, "1": 2, "2": 2, "3": 2}
    table.now_ns += 3
    table.send(request("late", [1], 1))
    assert planned(table) == {"runs": 1}


def test_nobody_passes_better_priority_or_who_lost_its_blocks() -> None:
    table = large_behind_a_runner()
    table.send(request("worse", [1], 1, priority=1), request("better", [1], 1, priority=-1))
    assert planned(table) == {"runs": 1, "better": 1}
    table = bench(10, rows=8)
    table.send(request("old", [0] * 20, 20), request("young", [1] * 19, 20))
    while not table.scheduler.counters.preemptions:
        planned(table)
    table.send(request("small", [1], 1))
    assert "small" not in planned(table)


def test_only_so_many_long_prefills_run_and_short_ones_pass() -> None:
    table = bench(
        200, rows=8, budget=40, long_prefill_token_threshold=10, max_long_prefills=1, max_passes=0
    )
    table.send(request("a", [0] * 30, 1), request("b", [1] * 30, 1), request("c", [2] * 9, 1))
    assert planned(table) == {"a": 10, "c": 9}
    assert planned(table) == {"a": 10}
    assert planned(table) == {"a": 10, "b": 10}


def test_two_long_prompts_do_not_start_what_only_one_can_finish() -> None:
    table = bench(10, rows=4, budget=8, long_prefill_token_threshold=4)
    table.send(request("a", [0] * 28, 1), request("b", [1] * 28, 1))
    table.run()
    assert table.scheduler.counters.preemptions == 0


def test_the_queue_is_bounded_by_tokens_but_takes_one_of_any_size() -> None:
    table = bench(64, max_waiting_tokens=20)
    table.send(request("big", [0] * 30))
    with pytest.raises(QueueFullError, match="30 tokens wait"):
        table.send(request("more", [0]))
    planned(table)
    table.send(request("a", [0] * 10), request("b", [0] * 10))
    with pytest.raises(QueueFullError, match="20 tokens wait, with the 1 of this request"):
        table.send(request("c", [0]))


def test_a_busy_tenant_does_not_keep_another_waiting() -> None:
    table = bench(200, "fair", rows=2, budget=32)
    table.send(*(request(f"many{i}", [0, i % 2], 10, tenant="many") for i in range(20)))
    for _ in range(15):
        table.turn()
    one = request("one", [1, 1], 10, tenant="one")
    table.send(one)
    turns = 0
    while one.finish_reason is None:
        table.turn()
        turns += 1
    assert turns <= 21


@pytest.mark.parametrize(("weight", "output"), [(3.0, 12), (1.0, 48)])
def test_tokens_are_shared_by_weight_not_by_requests(weight: float, output: int) -> None:
    table = bench(400, "fair", rows=4, budget=32, waiting=200)
    load = [
        request(f"{tenant}{i}", [0, i % 2], length, tenant=tenant, weight=share)
        for i in range(60)
        for tenant, share, length in (("a", 1.0, 12), ("b", weight, output))
    ]
    table.send(*load)
    tokens = {"a": 0, "b": 0}
    for _ in range(250):
        outcome = table.turn()
        for each in outcome.requests if outcome else ():
            tokens[each.tenant] += 1
    assert weight * 0.8 <= tokens["b"] / tokens["a"] <= weight * 1.25
