"""Drafts change how many steps a request takes, and nothing else; if they do not pay they rest."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_worker import generate_alone
from scheduler_bench import Bench, bench, grouped_bench, request
from scheduler_svc.core.draft_record import FIRST_REST, LONGEST_REST, TRIAL, DraftRecord
from scheduler_svc.core.drafting import MAX_ROWS
from scheduler_svc.core.kv_groups import KvGroup
from scheduler_svc.core.request import FinishReason, Request, Sampling
from scheduler_svc.core.step_plan import StepPlan, StepResult

NOBODY: frozenset[int] = frozenset()


def run(table: Bench) -> list[StepPlan]:
    """Run to the end; return the plans."""
    plans = []
    while table.scheduler.has_work:
        while (plan := table.plan()) is not None:
            plans.append(plan)
        table.answer()
    return plans


def looping(name: str = "loop", max_output: int = 40) -> Request:
    return request(name, PROMPT, max_output)


PROMPT = [0, 1, 0, 1, 1, 0]
"""Tokens are three, so pairs of them come again, and a third of what is drafted is right."""


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_draft", [1, 4])
def test_tokens_are_those_without_drafts(depth: int, num_draft: int) -> None:
    table = bench(depth=depth, num_draft_tokens=num_draft)
    each = looping()
    table.send(each)
    plans = run(table)
    assert each.output_token_ids().tolist() == generate_alone(PROMPT, 40, NOBODY)
    drafted = [plan for plan in plans if plan.drafts]
    assert drafted
    assert all(1 <= len(one.tokens) <= num_draft for plan in drafted for one in plan.drafts)
    counters = table.scheduler.counters
    assert counters.draft_tokens == sum(len(p.drafts[0].tokens) for p in drafted)
    assert 0 < counters.accepted_draft_tokens < counters.draft_tokens
    assert counters.generation_tokens == 40
    assert each.drafts is not None
    assert each.drafts.num_accepted == counters.accepted_draft_tokens
    # Every accepted token saves a step; the prompt and the first token share one.
    assert len(plans) == 40 - counters.accepted_draft_tokens


def test_a_row_with_a_draft_is_not_planned_before_its_result() -> None:
    table = bench(depth=2, num_draft_tokens=3)
    table.send(looping("one"), looping("two"))
    answered = -1
    waiting: dict[int, int] = {}
    while table.scheduler.has_work:
        while (plan := table.plan()) is not None:
            ran = {one.row for one in plan.drafts}
            assert ran <= set(plan.serial_rows.tolist())
            for row, count in zip(
                plan.exception_rows.tolist(), plan.exception_num_new_tokens.tolist(), strict=True
            ):
                assert count == 0 or waiting.get(row, -1) <= answered
            waiting |= dict.fromkeys(ran, plan.step_id)
        answered = table.answer().step_id


def test_no_draft_goes_beyond_the_end_or_the_budget() -> None:
    table = bench(depth=1, num_draft_tokens=8, budget=6)
    each = looping(max_output=9)
    table.send(each)
    plans = run(table)
    assert each.finish_reason is FinishReason.LENGTH
    assert each.output_token_ids().tolist() == generate_alone(PROMPT, 9, NOBODY)
    assert any(plan.drafts for plan in plans)
    assert max(plan.num_tokens for plan in plans) <= 6


def test_nobody_is_preempted_for_a_draft() -> None:
    # 46 tokens in 12 blocks of 4: not one more than the request needs.
    table = bench(12, depth=1, num_draft_tokens=8)
    each = looping(max_output=42)
    table.send(each)
    run(table)
    assert each.num_preemptions == 0
    assert each.output_token_ids().tolist() == generate_alone(PROMPT, 42, NOBODY)


def test_a_stop_inside_a_draft_ends_the_output_there() -> None:
    expected = generate_alone(PROMPT, 40, frozenset({2}))
    table = bench(depth=2, num_draft_tokens=4)
    each = request("stops", PROMPT, 40, stop=frozenset({2}))
    table.send(each)
    run(table)
    assert each.output_token_ids().tolist() == expected
    assert each.finish_reason is FinishReason.STOP


def test_blocks_are_named_by_accepted_tokens_only() -> None:
    table = bench(depth=2, num_draft_tokens=4)
    first = looping()
    table.send(first)
    run(table)
    again = request("again", first.tokens.tolist(), 4)
    table.send(again)
    run(table)
    known = first.tokens.tolist()
    assert again.num_cached_tokens == (len(known) - 1) // 4 * 4
    assert again.output_token_ids().tolist() == generate_alone(known, 4, NOBODY)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(0.0), Sampling(0.7, top_k=5, top_p=0.9, min_p=0.1, seed=3)],
)
def test_drawn_tokens_are_drafted_like_greedy_ones(sampling: Sampling) -> None:
    table = bench(num_draft_tokens=4)
    each = looping()
    each.sampling = sampling
    table.send(each)
    assert any(plan.drafts for plan in run(table))


def test_families_models_with_windows_and_crowds_have_no_drafts() -> None:
    family = bench(num_draft_tokens=4)
    family.send(request("n", PROMPT, 20, n=2))
    windowed = grouped_bench((KvGroup(window=4),), 32, num_draft_tokens=4)
    windowed.send(looping())
    off = bench()
    off.send(looping())
    crowd = bench(200, rows=MAX_ROWS + 1, num_draft_tokens=4, budget=400)
    crowd.send(*(request(str(i), PROMPT, 8) for i in range(MAX_ROWS + 1)))
    for table in (family, windowed, off, crowd):
        assert not any(plan.drafts for plan in run(table))


def test_drafts_that_fail_rest_longer_each_time_and_come_back() -> None:
    record, known = DraftRecord(), 100
    rests = []
    for _ in range(8):
        for _ in range(TRIAL):
            record.note(4, 0, known)
        rests.append(record.rests_until - known)
    assert rests[:3] == [FIRST_REST, 2 * FIRST_REST, 4 * FIRST_REST]
    assert rests[-1] == LONGEST_REST
    for _ in range(TRIAL):
        record.note(4, 4, known)
    assert record.rest == FIRST_REST
    assert record.num_drafted == 9 * TRIAL * 4
    assert record.num_accepted == TRIAL * 4


def test_a_request_that_rests_goes_on_without_waiting_for_its_tokens() -> None:
    table = bench(200, depth=2, num_draft_tokens=4)
    each = looping(max_output=40)
    each.drafts = DraftRecord(rests_until=26)
    table.send(each)
    plans = run(table)
    first = next(place for place, plan in enumerate(plans) if plan.drafts)
    # 6 tokens of the prompt, and one for each plan; the one in flight makes it one more.
    assert first >= 26 - len(PROMPT)
    assert each.output_token_ids().tolist() == generate_alone(PROMPT, 40, NOBODY)


def answered(table: Bench, change: dict[str, np.ndarray[tuple[int], np.dtype[np.int32]]]) -> None:
    """Run until a step with a draft, and answer it otherwise than the worker did."""
    while True:
        plan = table.plan()
        assert plan is not None
        if plan.drafts:
            result: StepResult = replace(table.wire[0][1], **change)  # type: ignore[arg-type]
            table.scheduler.apply(result, table.now_ns)
            return
        table.answer()


def column(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, dtype=np.int32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": column(*[2] * 6), "num_tokens": column(6)}, "gave 6 tokens of row 0"),
        ({"tokens": column(2), "num_tokens": column(2)}, "gave 1 tokens, expected 2"),
        ({"tokens": column(9, 9), "num_tokens": column(2)}, "did not draft"),
        ({"rows": column(3)}, "gave rows .3., expected .0."),
    ],
)
def test_an_answer_that_does_not_fit_the_draft_is_the_workers_fault(
    change: dict[str, np.ndarray[tuple[int], np.dtype[np.int32]]], message: str
) -> None:
    table = bench(num_draft_tokens=4)
    table.send(looping())
    with pytest.raises(ValueError, match=message):
        answered(table, change)


@settings(deadline=None, max_examples=150)
@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=10), min_size=1, max_size=4),
    num_draft=st.integers(1, 6),
    depth=st.integers(1, 2),
    num_blocks=st.integers(10, 30),
    failing=st.sets(st.tuples(st.integers(0, 12), st.integers(0, 3)), max_size=3),
)
def test_failed_rows_and_small_pools_change_no_other_token(
    prompts: list[list[int]],
    num_draft: int,
    depth: int,
    num_blocks: int,
    failing: set[tuple[int, int]],
) -> None:
    table = bench(num_blocks, depth=depth, num_draft_tokens=num_draft)
    requests = [request(str(i), prompt, 20) for i, prompt in enumerate(prompts)]
    table.send(*requests)
    for turn in range(400):
        if not table.scheduler.has_work and not table.wire:
            break
        table.turn(frozenset(row for when, row in failing if when == turn))
    assert not table.scheduler.has_work
    for each, prompt in zip(requests, prompts, strict=True):
        output = each.output_token_ids().tolist()
        assert output == generate_alone(prompt, 20, NOBODY)[: len(output)]
        assert each.finish_reason is FinishReason.ERROR or len(output) == 20
