"""What befalls a family between its prompt and its fork, and its members behind it."""

from collections.abc import Sequence

import numpy as np
import pytest

from fake_worker import generate_alone
from scheduler_bench import Bench, bench, limits, request
from scheduler_svc.core.request import Request
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step_plan import StepResult
from scheduler_svc.core.victims import VICTIM_POLICIES, VictimPolicy
from scheduler_svc.core.waiting_queue import waiting_queue

NO_STOP: frozenset[int] = frozenset()


def test_a_family_is_admitted_only_if_its_copies_fit_too() -> None:
    # The prompt takes 2 blocks, and two of three sequences will copy the second.
    for num_blocks, runs in ((3 + 4, True), (3 + 3, False)):
        table = bench(num_blocks, rows=4)
        table.send(request("first", [1] * 12, 1), request("family", [0] * 6, 3, n=3))
        table.plan()
        assert table.scheduler.num_running == 1 + runs
        table.run()
        assert table.scheduler.counters.preemptions == 0


def test_a_root_preempted_before_its_fork_gets_the_tokens_in_flight() -> None:
    table = bench(3, rows=4, depth=2)
    first, family = request("first", [1] * 8, 3), request("family", [0] * 4, 5, n=2)
    table.send(first, family)
    table.plan()
    table.plan()
    assert family.num_preemptions == 1
    assert family.num_pending_tokens == 1
    outcome = table.answer()
    assert [each for each in outcome.requests if each is not first] == [*family.members]
    assert table.scheduler.num_waiting == 2
    table.run()
    for member in family.members:
        alone = generate_alone([0] * 4, 5, NO_STOP, member.index)
        assert member.output_token_ids().tolist() == alone


@pytest.mark.parametrize("num_urgent", [1, 2, 3])
@pytest.mark.parametrize("when", range(8))
def test_an_urgent_request_takes_rows_in_the_middle_of_a_fork(when: int, num_urgent: int) -> None:
    def places(candidates: Sequence[Request], *_: object) -> list[int]:
        return [*range(len(candidates))]

    for victim in (VictimPolicy(places), *VICTIM_POLICIES.values()):
        scheduler = Scheduler(
            limits(budget=2, rows=4), waiting=waiting_queue("priority"), choose_victim=victim
        )
        table = Bench(scheduler, 64)
        family = request("family", [0, 1, 1], 4, n=4, priority=1)
        urgent = request("urgent", [1], 2, n=num_urgent)
        table.send(family)
        for _ in range(when):
            table.turn()
        table.send(urgent)
        table.run()
        for each in (family, urgent):
            prompt = each.tokens[: each.num_prompt_tokens].tolist()
            for member in each.members:
                length = member.stopping.max_output_tokens or 0
                alone = generate_alone(prompt, length, NO_STOP, member.index)
                assert member.output_token_ids().tolist() == alone


@pytest.mark.parametrize("budget", [10, 64])
def test_blocks_borrowed_from_a_sibling_are_doubted_when_its_row_fails(budget: int) -> None:
    # With the small budget they are borrowed one step after the one that writes them.
    scheduler = Scheduler(limits(budget, rows=4, depth=2), enable_prefix_caching=False)
    table = Bench(scheduler, 64)
    each = request("a", [0, 1, 1] * 3, 12, n=3)
    table.send(each)
    table.turn()
    table.wire.clear()
    scheduler.lose_worker(table.now_ns)
    scheduler.rejoin(table.now_ns)
    row = table_row(table, each.members[0])
    table.plan()
    assert [member.row is not None for member in each.members] == [True, True, True]
    # The lender has gone when its row is known to have failed.
    scheduler.abort(each.members[0], table.now_ns)
    _, result = table.wire.popleft()
    assert result.rows is not None
    kept = result.rows != row
    failed = StepResult(result.step_id, result.tokens[kept], ((row, "planted"),))
    scheduler.apply(failed, table.now_ns)
    scheduler.check()
    assert [member.num_preemptions for member in each.members[1:]] == [2, 2]
    table.run()
    for member in each.members[1:]:
        alone = generate_alone([0, 1, 1] * 3, 12, NO_STOP, member.index)
        assert member.output_token_ids().tolist() == alone


def table_row(table: Bench, member: Request) -> int:
    """Plan a step, and return the row that a member has in it."""
    assert table.plan() is not None
    assert member.row is not None
    return member.row


def test_a_member_that_fails_later_harms_no_sibling() -> None:
    table = bench(64, rows=4)
    each = request("a", [0, 1, 1] * 3, 12, n=3)
    table.send(each)
    for _ in range(4):
        table.turn()
    row = each.members[1].row
    assert row is not None
    outcome = table.turn(frozenset({row}))
    assert outcome is not None
    assert outcome.finished == [each.members[1]]
    assert each.members[1].error == "planted"
    table.run()
    assert [member.num_preemptions for member in each.members] == [0, 0, 0]


def test_a_root_that_fails_ends_its_family() -> None:
    table = bench(64, rows=4)
    each = request("a", [0, 1], 5, n=3)
    table.send(each)
    outcome = table.turn(frozenset({0}))
    assert outcome is not None
    assert outcome.finished == [*each.members]
    assert {member.error for member in each.members} == {"planted"}
    assert not table.scheduler.has_work


def test_a_result_with_the_wrong_number_of_samples_changes_nothing() -> None:
    table = bench(64, rows=4)
    each = request("a", [0, 1], 5, n=3)
    table.send(each)
    table.plan()
    _, result = table.wire[0]
    for wrong in (
        StepResult(0, result.tokens[:2]),
        StepResult(0, result.tokens, rows=np.array([1], dtype=np.int32)),
        StepResult(0, result.tokens, num_tokens=np.array([1, 2], dtype=np.int32)),
    ):
        with pytest.raises(ValueError, match="expected"):
            table.scheduler.apply(wrong, 0)
    table.run()


def test_the_row_of_a_family_is_serial_until_it_is_forked() -> None:
    table = bench(64, rows=4, depth=2)
    table.send(request("a", [0, 1], 5, n=3), request("b", [0, 1], 5))
    plan = table.plan()
    assert plan is not None
    assert plan.serial_rows.tolist() == [0]
    assert plan.admitted[0].num_samples == 3
    behind = table.plan()
    assert behind is not None
    assert behind.num_rows == 1
    assert behind.exception_rows.tolist() == [0]
    assert not len(behind.serial_rows)
    table.run()
