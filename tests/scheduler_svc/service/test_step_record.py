"""The means of recent steps are those of the newest records."""

from dataclasses import replace

import pytest

from scheduler_svc.service.step_record import RecentSteps, StepRecord

MS = 1_000_000


def record(step_id: int, period_ms: int = 30) -> StepRecord:
    """Return a step whose result comes after 15 ms, and whose tokens are out after 20 ms."""
    begin = step_id * period_ms * MS
    return StepRecord(
        step_id=step_id,
        epoch_number=1,
        num_rows=1,
        num_tokens=1,
        num_sampled=1,
        num_preempted=0,
        plan_bytes=1,
        result_bytes=1,
        running=1,
        waiting=0,
        schedule_begin_ns=begin,
        schedule_end_ns=begin + 1 * MS,
        encoded_ns=begin + 2 * MS,
        sent_ns=begin + 3 * MS,
        result_received_ns=begin + 15 * MS,
        decoded_ns=begin + 16 * MS,
        applied_ns=begin + 18 * MS,
        emitted_ns=begin + 20 * MS,
        wait_ns=2 * MS,
        prepare_ns=1 * MS,
        forward_ns=5 * MS,
        sample_ns=1 * MS,
        execute_ns=8 * MS,
        codec_ns=1 * MS,
        request_keys=(),
        traceparent="",
    )


def test_no_steps_have_no_means() -> None:
    assert RecentSteps().times() is None


def test_the_parts_of_a_step_sum_to_it() -> None:
    recent = RecentSteps()
    for step_id in range(5):
        recent.step(record(step_id))
    times = recent.times()
    assert times is not None
    assert times.steps == 5
    assert times.schedule_s == pytest.approx(0.001)
    assert times.encode_s == pytest.approx(0.002)
    assert times.wire_s == pytest.approx(0.002)
    assert times.worker_wait_s == pytest.approx(0.002)
    assert times.model_s == pytest.approx(0.008)
    assert times.emit_s == pytest.approx(0.004)


@pytest.mark.parametrize(("period_ms", "step_s"), [(30, 0.015), (21, 0.015), (19, 0.0186)])
def test_a_step_lasts_from_result_to_result_but_idle_time_is_not_counted(
    period_ms: int, step_s: float
) -> None:
    recent = RecentSteps()
    for step_id in range(10):
        recent.step(record(step_id, period_ms))
    times = recent.times()
    assert times is not None
    assert times.step_s == pytest.approx(step_s)


def test_only_the_newest_are_kept() -> None:
    recent = RecentSteps(capacity=2)
    for execute_ns in (100, 10, 20):
        recent.step(replace(record(0), execute_ns=execute_ns))
    times = recent.times()
    assert times is not None
    assert times.steps == 2
    assert times.model_s == pytest.approx(15e-9)


def test_clocks_that_disagree_give_no_time_below_zero() -> None:
    assert replace(record(0), execute_ns=10**12).wire_ns == 0
