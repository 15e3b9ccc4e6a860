"""A stream hands over what came, in order, within bounds, and says how it ended."""

import threading
import time
from pathlib import Path

import grpc
import pytest

from pagemill.v1 import worker_pb2
from scripted_scheduler import DEADLINE_S, Connection, ScriptedScheduler
from worker_svc.errors import InvariantError
from worker_svc.service import step_stream, wire
from worker_svc.service.step_stream import RefusedError, StepStream, StreamLostError


def hello() -> worker_pb2.WorkerHello:
    return worker_pb2.WorkerHello(boot_id=5, devices=[worker_pb2.Device(uuid="cpu-5")])


def joined(scheduler: ScriptedScheduler, stream: StepStream) -> Connection:
    connection = scheduler.accept()
    connection.acknowledge(pipeline_depth=2)
    assert isinstance(stream.receive(DEADLINE_S), worker_pb2.JoinAck)
    return connection


def test_a_plan_arrives_with_its_epoch_and_the_time_of_its_arrival() -> None:
    with ScriptedScheduler() as scheduler, StepStream(scheduler.address, hello()) as stream:
        connection = joined(scheduler, stream)
        sent_ns = time.monotonic_ns()
        connection.plan(0, traceparent="00-ab-cd-01")
        received = stream.receive(DEADLINE_S)
        assert isinstance(received, wire.ReceivedPlan)
        assert sent_ns < received.arrived_ns < time.monotonic_ns()
        assert received.decode_ns > 0
        assert received.epoch == wire.Epoch(incarnation=7, number=1)


def test_plans_beyond_twice_the_pipeline_are_refused_instead_of_queued() -> None:
    with ScriptedScheduler() as scheduler, StepStream(scheduler.address, hello()) as stream:
        connection = joined(scheduler, stream)
        for step_id in range(6):
            connection.plan(step_id)
        for step_id in range(4):
            received = stream.receive(DEADLINE_S)
            assert isinstance(received, wire.ReceivedPlan)
            assert received.plan.step_id == step_id
        with pytest.raises(InvariantError, match="where pipeline_depth is 2"):
            stream.receive(DEADLINE_S)


def test_a_plan_before_the_acknowledgement_is_refused() -> None:
    with ScriptedScheduler() as scheduler, StepStream(scheduler.address, hello()) as stream:
        scheduler.accept().plan(0)
        with pytest.raises(InvariantError, match="where pipeline_depth is 0"):
            stream.receive(DEADLINE_S)


@pytest.mark.parametrize("broken", [False, True], ids=["in order", "behind a broken plan"])
def test_a_block_left_in_peace_delivers_what_was_sent_and_does_not_dawdle(broken: bool) -> None:
    with ScriptedScheduler() as scheduler:
        with StepStream(scheduler.address, hello()) as stream:
            connection = joined(scheduler, stream)
            if broken:
                connection.plan(0, released_rows=b"abc")
                for step_id in range(1, 4):  # what is never looked at must not hold up the end
                    connection.plan(step_id)
                with pytest.raises(InvariantError, match="released_rows has 3 bytes"):
                    stream.receive(DEADLINE_S)
            for step_id in range(50):
                stream.send_result(worker_pb2.StepResult(step_id=step_id))
            left_s = time.monotonic()
        assert time.monotonic() - left_s < step_stream.CLOSE_DEADLINE_S
        for step_id in range(50):
            assert connection.hear("result").step_id == step_id
        connection.hear_end()


def test_a_silent_scheduler_is_a_lost_stream() -> None:
    with ScriptedScheduler() as scheduler, StepStream(scheduler.address, hello()) as stream:
        scheduler.accept()
        with pytest.raises(StreamLostError, match=r"nothing came for 0\.05 s"):
            stream.receive(0.05)


def test_nobody_at_the_address_is_a_lost_stream(socket_path: Path) -> None:
    with (
        pytest.raises(StreamLostError, match="UNAVAILABLE"),
        StepStream(f"unix:{socket_path}", hello()) as stream,
    ):
        stream.receive(DEADLINE_S)


def test_a_refusal_is_told_from_a_loss() -> None:
    with ScriptedScheduler() as scheduler, StepStream(scheduler.address, hello()) as stream:
        joined(scheduler, stream).end(grpc.StatusCode.FAILED_PRECONDITION)
        with pytest.raises(RefusedError, match="FAILED_PRECONDITION: as the test says"):
            stream.receive(DEADLINE_S)


def test_a_wake_ends_a_wait() -> None:
    with ScriptedScheduler() as scheduler, StepStream(scheduler.address, hello()) as stream:
        joined(scheduler, stream)
        threading.Thread(target=stream.wake).start()
        assert stream.receive(DEADLINE_S) is None


def send_without_end(scheduler: ScriptedScheduler) -> None:
    big = worker_pb2.StepResult(tokens=bytes(1 << 20))
    with StepStream(scheduler.address, hello()) as stream:
        scheduler.accept()
        for _ in range(2 * step_stream.OUTBOX_MESSAGES):
            stream.send_heartbeat(worker_pb2.Heartbeat())
            stream.send_result(big)


def test_a_peer_that_does_not_read_costs_heartbeats_and_then_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_stream, "SEND_DEADLINE_S", 0.05)
    with (
        ScriptedScheduler(reads=False) as scheduler,
        pytest.raises(StreamLostError, match="nothing could be sent"),
    ):
        send_without_end(scheduler)


def test_no_thread_outlives_its_stream() -> None:
    before = set(threading.enumerate())
    with ScriptedScheduler() as scheduler:
        with StepStream(scheduler.address, hello()) as stream:
            joined(scheduler, stream)
            ours = {thread for thread in threading.enumerate() if thread not in before}
            assert "reader" in {thread.name for thread in ours}
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline and any(
            thread.is_alive() and "request_iterator" in thread.name for thread in ours
        ):
            time.sleep(0.01)
        left = {thread.name for thread in ours if thread.is_alive()}
    assert not [name for name in left if name == "reader" or "request_iterator" in name]
