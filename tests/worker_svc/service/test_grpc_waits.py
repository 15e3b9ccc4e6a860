"""Who waits for a message sleeps until it comes."""

import sys
import threading
import time
from pathlib import Path

import grpc
import pytest
from grpc import _common

from pagemill.v1 import worker_pb2
from scripted_scheduler import DEADLINE_S, ScriptedScheduler
from worker_svc.service.grpc_waits import LONGEST_SLEEP_S, sleep_until_woken
from worker_svc.service.step_stream import StepStream, StreamLostError

WINDOW_S = 1.0


def num_sleeps(thread: threading.Thread) -> int:
    """Return how often a thread has given up its core by itself."""
    status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
    return int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])


@pytest.fixture
def sleeping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_common, "MAXIMUM_WAIT_TIMEOUT", _common.MAXIMUM_WAIT_TIMEOUT)
    sleep_until_woken()


@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts how often a thread slept")
@pytest.mark.usefixtures("sleeping")
def test_the_reader_of_a_silent_stream_does_not_look_again_and_again() -> None:
    hello = worker_pb2.WorkerHello(boot_id=5, devices=[worker_pb2.Device(uuid="cpu-5")])
    with ScriptedScheduler() as scheduler, StepStream(scheduler.address, hello) as stream:
        connection = scheduler.accept()
        connection.acknowledge(pipeline_depth=2)
        assert isinstance(stream.receive(DEADLINE_S), worker_pb2.JoinAck)
        (reader,) = (each for each in threading.enumerate() if each.name == "reader")
        before = num_sleeps(reader)
        time.sleep(WINDOW_S)
        assert num_sleeps(reader) - before < 5  # by itself gRPC looks ten times


@pytest.mark.usefixtures("sleeping")
def test_what_comes_and_the_end_wake_who_sleeps() -> None:
    hello = worker_pb2.WorkerHello(boot_id=5, devices=[worker_pb2.Device(uuid="cpu-5")])
    with ScriptedScheduler() as scheduler, StepStream(scheduler.address, hello) as stream:
        connection = scheduler.accept()
        connection.acknowledge(pipeline_depth=2)
        assert isinstance(stream.receive(DEADLINE_S), worker_pb2.JoinAck)
        for step_id in range(3):
            sent_s = time.monotonic()
            connection.plan(step_id)
            stream.receive(DEADLINE_S)
            stream.note_answered()
            assert time.monotonic() - sent_s < LONGEST_SLEEP_S / 2
        ended_s = time.monotonic()
        connection.end(grpc.StatusCode.UNAVAILABLE)
        with pytest.raises(StreamLostError):
            stream.receive(DEADLINE_S)
        assert time.monotonic() - ended_s < LONGEST_SLEEP_S / 2
