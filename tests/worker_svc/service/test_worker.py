"""A worker joins, answers plans in order, and survives what can happen to its stream."""

import threading
from pathlib import Path

import grpc
import pytest

from fake_model_host import FakeHost, running_worker
from pagemill.v1 import worker_pb2
from scripted_scheduler import DEADLINE_S, Connection, ScriptedScheduler, admitted
from worker_svc.errors import ConfigError
from worker_svc.runtime.step_plan import StepPlan
from worker_svc.service.exit_status import ExitStatus


def tokens_of(connection: Connection) -> list[int]:
    packed = connection.hear("result").tokens
    return [int.from_bytes(packed[i : i + 4], "little") for i in range(0, len(packed), 4)]


def test_a_worker_says_who_it_is_and_what_it_has_room_for() -> None:
    host = FakeHost()
    with (
        ScriptedScheduler() as scheduler,
        running_worker(host, scheduler.address, secret="open sesame"),
    ):
        connection = scheduler.accept()
        hello = connection.acknowledge(num_blocks_override=17, max_adapters=6)
        assert hello.protocol_version == 1
        assert hello.boot_id != 0
        assert hello.join_secret == "open sesame"
        assert hello.model == host.model
        assert [device.uuid for device in hello.devices] == [f"{hello.boot_id:016x}"]
        ready = connection.hear("ready")
        assert (ready.num_blocks, ready.block_bytes) == (17, 4096)
        assert (ready.weight_bytes, ready.load_s) == (1 << 20, 0.5)
    (limits,) = host.limits
    assert (limits.block_size, limits.max_num_seqs, limits.max_model_len) == (4, 8, 64)
    assert (limits.max_num_batched_tokens, limits.max_adapters) == (64, 6)


def test_plans_are_answered_in_order_and_in_one_thread() -> None:
    host = FakeHost()
    with ScriptedScheduler() as scheduler, running_worker(host, scheduler.address):
        connection = scheduler.accept()
        connection.take()
        connection.plan(0, admitted=[admitted(3)])
        for step_id in range(1, 50):
            connection.plan(step_id, admitted=[admitted(3)])
            result = connection.hear("result")
            assert result.step_id == step_id - 1
            assert (result.epoch.incarnation, result.epoch.number) == (7, 1)
            assert int.from_bytes(result.tokens, "little") == 100 * (step_id - 1) + 3
            assert result.timing.execute_ns == 10
            assert result.timing.wait_ns > 0
            assert result.timing.codec_ns > 0
    (runner,) = host.runners
    assert len(runner.threads) == 1


@pytest.mark.parametrize("transport", ["tcp", "unix"])
def test_tcp_and_unix_sockets_carry_the_same(
    transport: str, request: pytest.FixtureRequest
) -> None:
    address = "127.0.0.1:0"
    if transport == "unix":
        address = f"unix:{request.getfixturevalue('socket_path')}"
    with ScriptedScheduler(address) as scheduler, running_worker(FakeHost(), scheduler.address):
        connection = scheduler.accept()
        connection.take()
        connection.plan(0, admitted=[admitted(1), admitted(2)])
        assert tokens_of(connection) == [1, 2]


def test_heartbeats_go_on_while_the_model_loads_and_while_a_step_runs() -> None:
    gate = threading.Semaphore(0)

    def blocks(_plan: StepPlan | None = None) -> None:
        assert gate.acquire(timeout=DEADLINE_S)

    host = FakeHost(step=blocks, load=blocks)
    with ScriptedScheduler() as scheduler, running_worker(host, scheduler.address):
        connection = scheduler.accept()
        connection.acknowledge()
        for _ in range(3):
            connection.hear_heartbeat(worker_pb2.WORKER_PHASE_LOADING)
        gate.release()
        connection.hear("ready")
        assert connection.hear_heartbeat(worker_pb2.WORKER_PHASE_IDLE).expected_end_ns == 0
        for step_id in range(2):
            connection.plan(step_id)
            for _ in range(3):
                heartbeat = connection.hear_heartbeat(worker_pb2.WORKER_PHASE_RUNNING)
                assert heartbeat.step_id == step_id
                # Of the first step's end nothing is known; the second's is a past mean.
                assert (heartbeat.expected_end_ns > 0) == (step_id > 0)
            gate.release()
            connection.hear("result")


def test_a_lost_stream_keeps_model_cache_and_boot_id() -> None:
    host = FakeHost()
    with ScriptedScheduler() as scheduler, running_worker(host, scheduler.address):
        first = scheduler.accept()
        hello = first.take()
        first.plan(0)
        first.hear("result")
        first.end(grpc.StatusCode.ABORTED)
        second = scheduler.accept()
        assert second.take().boot_id == hello.boot_id
        second.plan(0, admitted=[admitted(5)])
        assert tokens_of(second) == [5]
    assert (host.num_loads, len(host.runners)) == (1, 1)


def test_a_scheduler_that_comes_back_is_found_again(socket_path: Path) -> None:
    address = f"unix:{socket_path}"
    host = FakeHost()
    with running_worker(host, address):
        boot_ids = set()
        for _ in range(3):
            with ScriptedScheduler(address) as scheduler:
                boot_ids.add(scheduler.accept().take().boot_id)
    assert len(boot_ids) == 1
    assert host.num_loads == 1


def test_other_limits_on_return_drop_the_cache_and_take_a_new_boot_id() -> None:
    host = FakeHost()
    with ScriptedScheduler() as scheduler, running_worker(host, scheduler.address):
        first = scheduler.accept()
        before = first.take(block_size=4)
        first.end(grpc.StatusCode.UNAVAILABLE)
        assert scheduler.accept().acknowledge(block_size=8).boot_id == before.boot_id
        after = scheduler.accept().take(block_size=8)
        assert after.boot_id != before.boot_id
    assert [limits.block_size for limits in host.limits] == [4, 8]


@pytest.mark.parametrize(
    "code",
    [
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNIMPLEMENTED,
    ],
)
def test_a_refused_worker_gives_up_with_status_3(code: grpc.StatusCode) -> None:
    with (
        ScriptedScheduler() as scheduler,
        running_worker(FakeHost(), scheduler.address) as worker,
    ):
        connection = scheduler.accept()
        connection.hear("hello")
        connection.end(code)
        assert worker.ends_with() == ExitStatus.REFUSED
        assert "as the test says" in worker.log.getvalue()


@pytest.mark.parametrize(
    "code",
    [
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.OK,
    ],
)
def test_any_other_end_is_followed_by_another_dial(code: grpc.StatusCode) -> None:
    with ScriptedScheduler() as scheduler, running_worker(FakeHost(), scheduler.address):
        connection = scheduler.accept()
        connection.hear("hello")
        connection.end(code)
        scheduler.accept().take()


def test_without_a_scheduler_the_join_timeout_ends_the_worker_with_status_4(
    socket_path: Path,
) -> None:
    with running_worker(FakeHost(), f"unix:{socket_path}", timeout_s=0.3) as worker:
        assert worker.ends_with() == ExitStatus.NO_SCHEDULER


def test_a_stop_lets_plans_in_flight_finish() -> None:
    gate = threading.Semaphore(0)

    def blocks(_plan: StepPlan) -> None:
        assert gate.acquire(timeout=DEADLINE_S)

    with (
        ScriptedScheduler() as scheduler,
        running_worker(FakeHost(step=blocks), scheduler.address) as worker,
    ):
        connection = scheduler.accept()
        connection.take()
        connection.plan(0)
        connection.plan(1)
        connection.stop()
        gate.release(2)
        assert [connection.hear("result").step_id for _ in range(2)] == [0, 1]
        connection.hear_end()
        assert worker.ends_with() == ExitStatus.STOPPED


def test_a_worker_asked_to_stop_answers_the_step_it_is_in_and_no_more() -> None:
    entered, gate = threading.Event(), threading.Event()

    def blocks(_plan: StepPlan) -> None:
        entered.set()
        assert gate.wait(DEADLINE_S)

    with (
        ScriptedScheduler() as scheduler,
        running_worker(FakeHost(step=blocks), scheduler.address) as worker,
    ):
        connection = scheduler.accept()
        connection.take()
        connection.plan(0)
        connection.plan(1)
        assert entered.wait(DEADLINE_S)
        worker.shutdown.ask()
        gate.set()
        assert connection.hear("result").step_id == 0
        connection.hear_end()
        assert worker.ends_with() == ExitStatus.STOPPED


@pytest.mark.parametrize("when", ["dialling", "unacknowledged", "idle"])
def test_a_worker_asked_to_stop_while_it_waits_stops(when: str, socket_path: Path) -> None:
    address = f"unix:{socket_path}"
    with running_worker(FakeHost(), address) as worker:
        if when == "dialling":
            worker.shutdown.ask()
            assert worker.ends_with() == ExitStatus.STOPPED
            return
        with ScriptedScheduler(address) as scheduler:
            connection = scheduler.accept()
            if when == "unacknowledged":
                connection.hear("hello")
            else:
                connection.take()
            worker.shutdown.ask()
            connection.hear_end()
            assert worker.ends_with() == ExitStatus.STOPPED


def test_a_worker_asked_to_stop_while_it_loads_leaves_at_once() -> None:
    gate = threading.Event()

    def blocks() -> None:
        assert gate.wait(DEADLINE_S)

    with (
        ScriptedScheduler() as scheduler,
        running_worker(FakeHost(load=blocks), scheduler.address) as worker,
    ):
        connection = scheduler.accept()
        connection.acknowledge()
        connection.hear_heartbeat(worker_pb2.WORKER_PHASE_LOADING)
        worker.shutdown.ask()
        worker.exited.result(DEADLINE_S)
        gate.set()


def test_an_exception_in_a_step_is_told_and_ends_the_worker_with_status_1() -> None:
    def fails(_plan: StepPlan) -> None:
        raise ZeroDivisionError("the step\ndivided by nothing")

    with (
        ScriptedScheduler() as scheduler,
        running_worker(FakeHost(step=fails), scheduler.address) as worker,
    ):
        connection = scheduler.accept()
        connection.take()
        connection.plan(0)
        failure = connection.hear("failure")
        assert failure.reason == "ZeroDivisionError: the step divided by nothing"
        assert not failure.permanent
        connection.hear_end()
        assert worker.ends_with() == ExitStatus.FAILED
        assert "Traceback" in worker.log.getvalue()


def test_an_impossible_model_is_told_and_ends_the_worker_with_status_2() -> None:
    def fails() -> None:
        raise ConfigError("max_model_len is 64, must be at most 8")

    with (
        ScriptedScheduler() as scheduler,
        running_worker(FakeHost(load=fails), scheduler.address) as worker,
    ):
        connection = scheduler.accept()
        connection.acknowledge()
        failure = connection.hear("failure")
        assert failure.reason == "max_model_len is 64, must be at most 8"
        assert failure.permanent
        assert worker.ends_with() == ExitStatus.IMPOSSIBLE


@pytest.mark.parametrize(
    ("plans", "sentence"),
    [
        ([{"step_id": 0, "reset": False}], "step 0 is the stream's first, and must be a reset"),
        ([{"step_id": 0}, {"step_id": 2}], "step 2 came where step 1 was due"),
        ([{"step_id": 0}, {"step_id": 0, "reset": False}], "step 0 came where step 1 was due"),
        ([{"step_id": 3, "reset": True}], "step 3 came where step 0 was due"),
        (
            [{"step_id": 0}, {"step_id": 1, "epoch": worker_pb2.Epoch(incarnation=7, number=2)}],
            "step 1 is for epoch 2 of 0x7 after epoch 1 of 0x7, without a reset",
        ),
        (
            [{"step_id": 0, "transfers": [worker_pb2.BlockTransfer()]}],
            "plan uses transfers, which this worker does not serve",
        ),
        (
            [{"step_id": 0, "released_rows": b"abc"}],
            "released_rows has 3 bytes, must be a multiple of 4",
        ),
    ],
)
def test_a_plan_out_of_order_or_out_of_form_is_told_and_not_run(
    plans: list[dict[str, object]], sentence: str
) -> None:
    host = FakeHost()
    with ScriptedScheduler() as scheduler, running_worker(host, scheduler.address) as worker:
        connection = scheduler.accept()
        connection.take()
        for changes in plans[:-1]:
            connection.plan(**changes)  # type: ignore[arg-type]
            connection.hear("result")
        connection.plan(**plans[-1])  # type: ignore[arg-type]
        assert connection.hear("failure").reason == f"InvariantError: {sentence}"
        assert worker.ends_with() == ExitStatus.FAILED
    assert len(host.runners[0].plans) == len(plans) - 1


def test_a_plan_before_the_acknowledgement_is_told() -> None:
    with (
        ScriptedScheduler() as scheduler,
        running_worker(FakeHost(), scheduler.address) as worker,
    ):
        connection = scheduler.accept()
        connection.hear("hello")
        connection.plan(0)
        assert "pipeline_depth is 0" in connection.hear("failure").reason
        assert worker.ends_with() == ExitStatus.FAILED


def test_a_row_that_asks_for_what_is_not_served_fails_alone() -> None:
    with ScriptedScheduler() as scheduler, running_worker(FakeHost(), scheduler.address):
        connection = scheduler.accept()
        connection.take()
        connection.plan(0, admitted=[admitted(1), admitted(2, guide_json="{}")])
        result = connection.hear("result")
        assert int.from_bytes(result.tokens, "little") == 1
        assert [(error.row, error.reason) for error in result.errors] == [
            (2, "guide_json is asked for, which this worker does not serve")
        ]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"rank": 1}, "rank 1 is assigned, must be below world_size 1"),
        ({"block_size": 0}, "block_size is 0, must be at least 1"),
        ({"pipeline_depth": 0}, "pipeline_depth is 0, must be at least 1"),
        ({"heartbeat_s": 0.0}, "heartbeat_s is 0.0, must be above 0"),
        ({"heartbeat_s": float("nan")}, "heartbeat_s is nan, must be above 0"),
    ],
)
def test_a_place_that_cannot_be_taken_is_told(changes: dict[str, object], sentence: str) -> None:
    with (
        ScriptedScheduler() as scheduler,
        running_worker(FakeHost(), scheduler.address) as worker,
    ):
        connection = scheduler.accept()
        connection.acknowledge(**changes)
        assert sentence in connection.hear("failure").reason
        assert worker.ends_with() == ExitStatus.FAILED


def test_the_secret_is_in_no_log_line() -> None:
    with (
        ScriptedScheduler() as scheduler,
        running_worker(FakeHost(), scheduler.address, secret="open sesame") as worker,
    ):
        scheduler.accept().take()
        worker.shutdown.ask()
        worker.ends_with()
        assert "joined" in worker.log.getvalue()
        assert "open sesame" not in worker.log.getvalue()


def test_the_device_that_the_scheduler_chose_is_used() -> None:
    host = FakeHost()
    host.device.uuid = "GPU-0"
    host.more_devices = (worker_pb2.Device(kind="cuda", uuid="GPU-1"),)
    with ScriptedScheduler() as scheduler, running_worker(host, scheduler.address):
        connection = scheduler.accept()
        hello = connection.hear("hello")
        assert [device.uuid for device in hello.devices] == ["GPU-0", "GPU-1"]
        connection.acknowledge_hello(hello, device_uuid="GPU-1")
        connection.hear("ready")
    assert host.used == ["GPU-1"]
