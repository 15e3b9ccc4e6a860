"""A deadline is refused only if it cannot be kept, and then it is."""

import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deadline_simulation import FIXED_NS, TOKEN_NS, DeadlineRun
from scheduler_bench import Bench, bench, limits, request
from scheduler_svc.core.errors import HopelessDeadlineError
from scheduler_svc.core.request import Request, Sampling, Stopping
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.start_estimate import FACTOR
from scheduler_svc.core.step_pace import MIN_STEPS, NUM_STEPS, StepPace
from scheduler_svc.core.waiting_queue import waiting_queue

MS = 1_000_000
POLICIES = ("fcfs", "priority", "fair")


def drawn_load(chance: random.Random, count: int, most_wait_ms: int) -> list[Request]:
    """Return requests that share prefixes, most with deadlines near what they need."""
    systems = [[chance.randrange(2) for _ in range(chance.randrange(24))] for _ in range(3)]
    now_ns, load = 0, list[Request]()
    for number in range(count):
        now_ns += chance.choice((0, 0, 0, 0, chance.randrange(8 * MS)))
        own = [chance.randrange(2) for _ in range(1 + chance.randrange(30))]
        prompt = chance.choice(systems) + own
        deadline_ns = now_ns + 1 + chance.randrange(most_wait_ms * MS)
        load.append(
            Request(
                str(number),
                array("i", prompt),
                Sampling(0.0),
                Stopping(1 + chance.randrange(12), frozenset({chance.randrange(6)})),
                read_cache=chance.random() < 0.8,
                priority=chance.randrange(3),
                tenant=chance.choice("ab"),
                arrival_ns=now_ns,
                deadline_ns=deadline_ns if chance.random() < 0.5 else None,
            )
        )
    return load


def drawn_run(seed: int) -> tuple[DeadlineRun, list[Request]]:
    chance = random.Random(seed)
    budget = chance.choice((4, 8, 16, 48))
    rows = min(budget, chance.choice((1, 2, 4, 8)))
    threshold = chance.choice((0, 0, 3, budget))
    scheduler = Scheduler(
        limits(
            budget,
            rows,
            depth=chance.choice((1, 2)),
            waiting=200,
            long_prefill_token_threshold=threshold,
            max_long_prefills=chance.choice((0, 1)) if threshold else 0,
        ),
        enable_prefix_caching=chance.random() < 0.7,
        waiting=waiting_queue(chance.choice(POLICIES)),
    )
    slow = frozenset(step for step in range(400) if chance.random() < 0.05)
    run = DeadlineRun(scheduler, chance.choice((16, 24, 60)), slow)
    for num_tokens in chance.choices(range(1, budget + 1), k=MIN_STEPS):
        run.pace.note(num_tokens, FIXED_NS + num_tokens * TOKEN_NS)
    run.run(drawn_load(chance, chance.randrange(1, 80), chance.choice((10, 30, 60, 200))))
    return run, run.hopeless


@settings(deadline=None, max_examples=80)
@given(seed=st.integers(0, 2**32))
def test_nobody_is_refused_who_would_have_been_served_in_time(seed: int) -> None:
    run, hopeless = drawn_run(seed)
    assert [each.request_id for each in hopeless if run.served_in_time(each)] == []
    # Nor anybody who would have had a single token of it.
    assert [each.request_id for each in hopeless if each.first_token_ns is not None] == []


def test_the_loads_above_have_hopeless_requests() -> None:
    assert sum(len(drawn_run(seed)[1]) for seed in range(20)) >= 40


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("cached", [True, False])
def test_in_a_crowd_all_but_the_first_are_hopeless_and_none_of_those_served(
    policy: str, *, cached: bool
) -> None:
    """100 prompts of 32 tokens come at once and wait 40 ms at most; a step of 32 takes 4.2 ms."""
    scheduler = Scheduler(
        limits(32, 8, waiting=200),
        enable_prefix_caching=cached,
        waiting=waiting_queue(policy),
    )
    run = DeadlineRun(scheduler, 400)
    warm_up = [request(f"w{i}", [i % 2, i // 2 % 2, 1] * 9, 9) for i in range(20)]
    come_ns = 1000 * MS
    crowd = [
        Request(
            str(number),
            array("i", [9 + number] * 32),
            Sampling(0.0),
            Stopping(2),
            arrival_ns=come_ns,
            deadline_ns=come_ns + 40 * MS,
        )
        for number in range(100)
    ]
    run.run([*warm_up, *crowd])
    served = [each for each in crowd if run.served_in_time(each)]
    assert 5 <= len(served) <= 12
    assert len(run.hopeless) >= 50
    assert not {*map(id, served)} & {*map(id, run.hopeless)}


def steady_pace(execute_ns: int = MS, num_tokens: int = 64) -> StepPace:
    pace = StepPace()
    for _ in range(NUM_STEPS):
        pace.note(num_tokens, execute_ns)
    return pace


def crowded(num_waiting: int, policy: str = "fcfs") -> Bench:
    """All rows taken, and others waiting, each with a prompt of its own of one full step."""
    table = bench(4000, policy, rows=4, budget=64, length=128, waiting=10_000)
    for number in range(4 + num_waiting):
        table.send(request(f"r{number}", [number] * 64, 20))
        if number < 4:
            table.turn()
    return table


def hurried(deadline_ns: int, **more: object) -> Request:
    asked = request("hurried", [1], 2, **more)  # type: ignore[arg-type]  # any of them
    asked.deadline_ns = deadline_ns
    return asked


def test_the_refusal_says_what_stands_before() -> None:
    table = crowded(50)
    with pytest.raises(HopelessDeadlineError) as refused:
        table.scheduler.add(hurried(table.now_ns + 10 * MS), table.now_ns, steady_pace())
    # 50 wait, of whom 8 may be passed; one row has 3 tokens of its prompt left.
    assert str(refused.value) == (
        "the deadline is in 0.010 s, the earliest start in 0.042 s: 50 requests wait before this "
        "one, and 2695 tokens run before it, at most 64 in 0.001 s"
    )
    assert table.scheduler.num_waiting == 50
    table.scheduler.add(hurried(table.now_ns + 22 * MS), table.now_ns, steady_pace())


def test_the_bound_is_the_stated_factor() -> None:
    earliest = 42 * MS
    for refused in (True, False):
        table = crowded(50)
        in_time = table.now_ns + MS + earliest // FACTOR - refused
        if refused:
            with pytest.raises(HopelessDeadlineError):
                table.scheduler.add(hurried(in_time), table.now_ns, steady_pace())
        else:
            table.scheduler.add(hurried(in_time), table.now_ns, steady_pace())


def test_nobody_is_refused_while_nobody_waits_or_nothing_was_measured() -> None:
    table = crowded(0)
    table.scheduler.add(hurried(table.now_ns + 1), table.now_ns, steady_pace(10**12))
    table = crowded(50)
    young = StepPace()
    for _ in range(MIN_STEPS - 1):
        young.note(64, 10**12)
    table.scheduler.add(hurried(table.now_ns + 1), table.now_ns, young)


def test_who_goes_before_the_others_is_measured_by_what_goes_before_him() -> None:
    soon = 10 * MS
    table = crowded(50, "priority")
    table.scheduler.add(hurried(soon, priority=-1), table.now_ns, steady_pace())
    table = crowded(50, "fair")
    table.scheduler.add(hurried(soon, tenant="other"), table.now_ns, steady_pace())
    with pytest.raises(HopelessDeadlineError):
        table.scheduler.add(hurried(soon), table.now_ns, steady_pace())


def test_prompts_that_are_equal_are_computed_once() -> None:
    table = bench(4000, rows=4, budget=64, length=128, waiting=10_000)
    table.send(*(request(f"r{number}", [0, 1] * 32, 20) for number in range(54)))
    table.scheduler.add(hurried(10 * MS), table.now_ns, steady_pace())


def test_those_who_give_up_before_do_not_count() -> None:
    table = crowded(0)
    for number in range(50):
        table.send(request(f"w{number}", [9 + number] * 64, 20))
    for each in list(table.scheduler._state.waiting):
        each.deadline_ns = table.now_ns + 5 * MS
    table.scheduler.add(hurried(table.now_ns + 10 * MS), table.now_ns, steady_pace())


def test_rows_that_cannot_end_soon_are_waited_for() -> None:
    table = bench(400, rows=2, length=128)
    stopping = Stopping(60, frozenset({1}), min_output_tokens=50)
    table.send(*(Request(str(i), array("i", [i]), Sampling(0.0), stopping) for i in range(2)))
    table.turn()
    table.send(*(request(f"w{i}", [i], 2) for i in range(9)))
    with pytest.raises(HopelessDeadlineError):
        table.scheduler.add(hurried(10 * MS), table.now_ns, steady_pace())
    table.scheduler.add(hurried(30 * MS), table.now_ns, steady_pace())


def test_the_pace_is_that_of_the_fastest_full_step_if_there_was_one() -> None:
    pace = StepPace()
    for number in range(NUM_STEPS):
        pace.note(4, 2 * MS + number)
    assert (pace.fastest_ns(), pace.full_ns(64)) == (2 * MS, 2 * MS)
    pace.note(32, 9 * MS)
    pace.note(64, 8 * MS)
    assert (pace.fastest_ns(), pace.full_ns(64), pace.slowest_ns()) == (2 * MS + 2, 8 * MS, 9 * MS)
    pace.forget()
    assert (pace.fastest_ns(), pace.full_ns(64), pace.slowest_ns()) == (0, 0, 0)


def test_the_simulated_steps_are_as_stated() -> None:
    assert FIXED_NS + 32 * TOKEN_NS == 4_200_000


def test_a_request_whose_deadline_passed_in_the_queue_is_never_scheduled() -> None:
    table = bench(64, rows=1)
    table.send(request("runs", [0], 3), late := hurried(5), request("next", [1, 1], 1))
    table.plan()
    table.now_ns = 10
    table.run()
    assert table.scheduler.take_expired() == [late]
    assert table.scheduler.take_expired() == []
    assert (late.first_scheduled_ns, late.num_output_tokens) == (None, 0)
    assert table.scheduler.counters.prompt_tokens == 3
