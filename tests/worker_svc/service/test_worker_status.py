"""A heartbeat tells the phase, the step, and when the step should end by its forerunners."""

from pagemill.v1 import worker_pb2
from worker_svc.service.worker_status import RECENT_STEPS, Phase, WorkerStatus


def test_phases_are_those_of_the_wire() -> None:
    values = {phase.value for phase in Phase}
    assert values == set(worker_pb2.WorkerPhase.values()) - {worker_pb2.WORKER_PHASE_UNSPECIFIED}


def test_the_expected_end_is_the_mean_of_recent_steps_from_the_begin() -> None:
    status = WorkerStatus()
    for step_id, duration_ns in enumerate([10**9] * 5 + [100, 300] * (RECENT_STEPS // 2)):
        status.begin_step(step_id, now_ns=0)
        status.end_step(duration_ns)
    assert status.heartbeat(now_ns=0).expected_end_ns == 0
    status.begin_step(99, now_ns=1000)
    heartbeat = status.heartbeat(now_ns=1050)
    assert heartbeat.phase == worker_pb2.WORKER_PHASE_RUNNING
    assert (heartbeat.step_id, heartbeat.expected_end_ns) == (99, 150)


def test_an_overdue_step_is_not_taken_for_an_idle_worker() -> None:
    status = WorkerStatus()
    status.begin_step(0, now_ns=0)
    status.end_step(100)
    status.begin_step(1, now_ns=0)
    assert status.heartbeat(now_ns=10**6).expected_end_ns == 1
    status.enter(Phase.STOPPING)
    assert status.heartbeat(now_ns=10**6).expected_end_ns == 0
