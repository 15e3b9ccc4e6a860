"""A plan is made as late as the latest steps say is safe, and never waits without reason."""

from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.core.plan_pacing import LEAD_SHARE, SHORT_STEP_NS, PlanPacing

long_steps = st.integers(SHORT_STEP_NS, 10**10)


def test_without_a_prediction_nothing_waits() -> None:
    pacing = PlanPacing()
    pacing.step_sent(10**12, worker_idle=True)
    assert pacing.due_ns() <= 10**12


def test_short_steps_are_followed_at_once() -> None:
    pacing = PlanPacing()
    pacing.step_landed(10**12, SHORT_STEP_NS - 1)
    pacing.step_landed(10**12, 10**9)
    assert pacing.due_ns() <= 10**12


@given(
    before=st.lists(long_steps, max_size=20), latest=st.lists(long_steps, min_size=8, max_size=8)
)
def test_the_lead_is_a_share_of_the_shortest_of_the_latest_steps(
    before: list[int], latest: list[int]
) -> None:
    pacing = PlanPacing()
    for execute_ns in (*before, *latest):
        pacing.step_landed(500, execute_ns)
    wait_ns = pacing.due_ns() - 500
    assert wait_ns <= min(latest) * (1 - LEAD_SHARE) < wait_ns + 1


def test_a_step_begins_when_the_worker_is_free_for_it() -> None:
    pacing = PlanPacing()
    pacing.step_landed(1_000, 100_000_000)
    behind_a_result = pacing.due_ns()
    pacing.step_sent(2_000, worker_idle=False)
    assert pacing.due_ns() == behind_a_result
    pacing.step_sent(3_000, worker_idle=True)
    assert pacing.due_ns() == behind_a_result + 2_000


def test_another_worker_may_be_of_another_speed() -> None:
    pacing = PlanPacing()
    pacing.step_landed(10**12, 10**9)
    pacing.forget()
    assert pacing.due_ns() <= 10**12
