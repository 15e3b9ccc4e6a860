"""A device has its next step before it ends one, and every step that it was handed is answered."""

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast
from unittest.mock import Mock

import pytest

from fake_model_host import FakeHost, running_worker
from scripted_scheduler import DEADLINE_S, Connection, ScriptedScheduler, admitted
from worker_svc.runtime.step_plan import StepPlan
from worker_svc.service import launch_loop
from worker_svc.service.exit_status import ExitStatus


class Device:
    """Runs a step when the test lets it, and says which ones it was handed."""

    def __init__(self) -> None:
        self.handed: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._gate = threading.Semaphore(0)

    def host(self) -> FakeHost:
        return FakeHost(step=self._run, launched=lambda plan: self.handed.put(plan.step_id))

    def let_run(self, steps: int) -> None:
        self._gate.release(steps)

    def _run(self, _plan: StepPlan) -> None:
        assert self._gate.acquire(timeout=DEADLINE_S)


def test_a_plan_is_launched_while_the_one_before_it_runs() -> None:
    device = Device()
    with (
        ScriptedScheduler() as scheduler,
        running_worker(device.host(), scheduler.address),
    ):
        connection = scheduler.accept()
        connection.take()
        for step_id in range(3):
            connection.plan(step_id, admitted=[admitted(step_id)])
        # Not one of them has ended.
        assert [device.handed.get(timeout=DEADLINE_S) for _ in range(3)] == [0, 1, 2]
        device.let_run(3)
        for step_id in range(3):
            result = connection.hear("result")
            assert result.step_id == step_id
            assert int.from_bytes(result.tokens, "little") == 101 * step_id


def test_a_stop_lets_launched_steps_finish() -> None:
    device = Device()
    with (
        ScriptedScheduler() as scheduler,
        running_worker(device.host(), scheduler.address) as worker,
    ):
        connection = scheduler.accept()
        connection.take()
        connection.plan(0)
        connection.plan(1)
        connection.stop()
        device.let_run(2)
        assert [connection.hear("result").step_id for _ in range(2)] == [0, 1]
        connection.hear_end()
        assert worker.ends_with() == ExitStatus.STOPPED


def test_a_worker_asked_to_stop_answers_what_it_has_launched() -> None:
    device = Device()
    with (
        ScriptedScheduler() as scheduler,
        running_worker(device.host(), scheduler.address) as worker,
    ):
        connection = scheduler.accept()
        connection.take()
        connection.plan(0)
        assert device.handed.get(timeout=DEADLINE_S) == 0
        worker.shutdown.ask()
        device.let_run(1)
        assert connection.hear("result").step_id == 0
        connection.hear_end()
        assert worker.ends_with() == ExitStatus.STOPPED


def raises(_plan: StepPlan) -> None:
    raise ZeroDivisionError("the step\ndivided by nothing")


def passes(_plan: StepPlan) -> None:
    pass


@pytest.mark.parametrize(("step", "launched"), [(raises, passes), (passes, raises)])
def test_what_goes_wrong_is_told_and_ends_the_worker(
    step: Callable[[StepPlan], None], launched: Callable[[StepPlan], None]
) -> None:
    host = FakeHost(step=step, launched=launched)
    with ScriptedScheduler() as scheduler, running_worker(host, scheduler.address) as worker:
        connection = scheduler.accept()
        connection.take()
        connection.plan(0)
        failure = connection.hear("failure")
        assert failure.reason == "ZeroDivisionError: the step divided by nothing"
        connection.hear_end()
        assert worker.ends_with() == ExitStatus.FAILED


def test_the_tokens_of_a_refused_row_are_dropped_though_it_is_released_meanwhile() -> None:
    device = Device()
    with (
        ScriptedScheduler() as scheduler,
        running_worker(device.host(), scheduler.address),
    ):
        connection = scheduler.accept()
        connection.take()
        refused = admitted(1, guide_json="{}")
        connection.plan(0, admitted=[refused, admitted(2)])
        connection.plan(1, released_rows=(1).to_bytes(4, "little"))
        assert [device.handed.get(timeout=DEADLINE_S) for _ in range(2)] == [0, 1]
        device.let_run(2)
        assert rows_that_failed(connection) == [1]
        assert rows_that_failed(connection) == []


def rows_that_failed(connection: Connection) -> list[int]:
    result = connection.hear("result")
    assert int.from_bytes(result.tokens, "little") in {0, 2}
    return [error.row for error in result.errors]


def test_an_adapter_is_answered_while_steps_run() -> None:
    device = Device()
    host = device.host()
    host.adapters.generations = {"poet": 77}
    with ScriptedScheduler() as scheduler, running_worker(host, scheduler.address):
        connection = scheduler.accept()
        connection.take()
        connection.plan(0)
        connection.adapter(adapter=1, path="poet", number=1)
        answer = connection.hear("adapter")
        assert (answer.number, answer.generation, answer.error) == (1, 77, "")
        device.let_run(1)
        assert connection.hear("result").step_id == 0


class _Hung:
    """A runner whose steps do not end until the test is over."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def collect(self, _launched: object) -> None:
        assert self.over.wait(DEADLINE_S)
        raise RuntimeError("over")


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Hung]:
    monkeypatch.setattr(launch_loop, "LAST_STEPS_DEADLINE_S", 0.01)
    runner = _Hung()
    yield runner
    runner.over.set()


@contextmanager
def answering(runner: _Hung, num_steps: int) -> Iterator[Any]:
    """Yield what answers, with so many steps under way."""
    answers: Any = launch_loop._Answers(cast("Any", runner), Mock(), Mock(), Mock())
    with answers:
        for _ in range(num_steps):
            answers._steps.put(Mock(spec=launch_loop._Step), timeout=DEADLINE_S)
        yield answers


ONE_AND_ALL = (1, launch_loop.STEPS_UNDER_WAY + 1)


@pytest.mark.parametrize("num_steps", ONE_AND_ALL)
def test_a_device_that_hangs_hides_no_error_that_came_before(hung: _Hung, num_steps: int) -> None:
    with pytest.raises(ZeroDivisionError), answering(hung, num_steps):
        raise ZeroDivisionError


@pytest.mark.parametrize("num_steps", ONE_AND_ALL)
def test_a_loop_with_a_step_that_hangs_ends_in_no_good_order(hung: _Hung, num_steps: int) -> None:
    with (
        pytest.raises(launch_loop.HungStepError, match=r"not ended for 0\.01 s"),
        answering(hung, num_steps),
    ):
        pass


def test_a_device_that_takes_no_more_steps_is_named(hung: _Hung) -> None:
    with (
        pytest.raises(launch_loop.HungStepError, match=r"not ended for 0\.01 s"),
        answering(hung, launch_loop.STEPS_UNDER_WAY + 1) as answers,
    ):
        answers.expect(Mock(spec=launch_loop._Step))
