"""The worker's life between two joins, on a device that computes beside the host."""

import contextlib
import queue
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from pagemill.v1 import worker_pb2
from worker_svc.errors import InvariantError
from worker_svc.service import wire
from worker_svc.service.adapter_loading import AdapterLoading
from worker_svc.service.logs import Logger
from worker_svc.service.model_host import LaunchRunner
from worker_svc.service.plan_order import PlanOrder
from worker_svc.service.refused_rows import RefusedRows
from worker_svc.service.shutdown import Shutdown
from worker_svc.service.step_answer import write_answer
from worker_svc.service.step_stream import StepStream
from worker_svc.service.worker_status import Phase, WorkerStatus

STEPS_UNDER_WAY: Final = 8
"""Launched steps whose results nobody has waited for yet. Plans in flight are fewer."""

LAST_STEPS_DEADLINE_S: Final = 60.0
"""For the steps still under way when the stream ends."""


class HungStepError(Exception):
    """A launched step does not end: the device's fault. The process ends."""

    def __init__(self) -> None:
        super().__init__(f"a launched step has not ended for {LAST_STEPS_DEADLINE_S:g} s")


class _Step(NamedTuple):
    """A launched step, and what its answer needs."""

    received: wire.ReceivedPlan
    launched: Any
    refused: RefusedRows
    refusals: Sequence[tuple[int, str]]
    begin_ns: int


class LaunchLoop:
    """Launches the plans of one stream as they come; a thread of its own answers as steps end.

    So the device has its next step before it ends one, and a plan never waits for a result.
    """

    def __init__(
        self,
        runner: LaunchRunner,
        adapters: AdapterLoading,
        status: WorkerStatus,
        shutdown: Shutdown,
        log: Logger,
    ) -> None:
        self._runner = runner
        self._adapters = adapters
        self._status = status
        self._shutdown = shutdown
        self._log = log
        self._order = PlanOrder()
        self._refused = RefusedRows()

    def run(self, stream: StepStream) -> None:
        """Run plans until the scheduler or the process is asked to stop.

        Raises: as `StepLoop.run`, also for what happens as steps end; HungStepError if none does.
        """
        with (
            _Answers(self._runner, stream, self._status, self._log) as answers,
            self._shutdown.waking(stream.wake),
        ):
            while not self._shutdown.asked:
                # Without a deadline: an idle scheduler sends nothing; a lost one ends the stream.
                match stream.receive(timeout_s=None):
                    case wire.ReceivedPlan() as received:
                        answers.expect(self._launch(received))
                    case worker_pb2.AdapterChange() as change:
                        self._adapters.take(change, stream.send_adapter_answer)
                    case worker_pb2.StopWorker():
                        self._log.info("the scheduler stops this worker")
                        break
                    case worker_pb2.JoinAck() | worker_pb2.Rendezvous() as message:
                        raise InvariantError(f"a {type(message).__name__} came among plans")
                    case None:
                        answers.check()
        self._status.enter(Phase.STOPPING)

    def _launch(self, received: wire.ReceivedPlan) -> _Step:
        begin_ns = time.monotonic_ns()
        plan = received.plan
        self._order.check(plan.step_id, received.epoch, reset=plan.reset)
        refusals = self._refused.follow(plan, received.refusals)
        launched = self._runner.launch(plan)
        return _Step(received, launched, self._refused.snapshot(), refusals, begin_ns)


class _Answers:
    """The thread that waits for steps, oldest first, and answers each."""

    def __init__(
        self, runner: LaunchRunner, stream: StepStream, status: WorkerStatus, log: Logger
    ) -> None:
        self._runner = runner
        self._stream = stream
        self._status = status
        self._log = log
        self._steps: queue.Queue[_Step | None] = queue.Queue(STEPS_UNDER_WAY)
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="answers", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Answer what is under way.

        Raises: what answering raised, or HungStepError; unless something else was raised before.
        """
        deadline_s = time.monotonic() + LAST_STEPS_DEADLINE_S
        # A queue that stays full has no thread that would read its end.
        with contextlib.suppress(queue.Full):
            self._steps.put(None, timeout=LAST_STEPS_DEADLINE_S)
        self._thread.join(max(deadline_s - time.monotonic(), 0))
        if kind is None:
            self.check()
            if self._thread.is_alive():
                raise HungStepError

    def expect(self, step: _Step) -> None:
        """Answer this step when it ends.

        Raises: what answering an earlier one raised; HungStepError if none of them ends.
        """
        self.check()
        try:
            self._steps.put(step, timeout=LAST_STEPS_DEADLINE_S)
        except queue.Full:
            raise HungStepError from None

    def check(self) -> None:
        """Raise what answering raised."""
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        """Answer until told to end. After an error steps are taken, but not answered."""
        while (step := self._steps.get()) is not None:
            if self._error is not None:
                continue
            try:
                self._answer(step)
            except Exception as error:  # noqa: BLE001 the outermost frame: the main thread raises it
                self._error = error
                self._stream.wake()

    def _answer(self, step: _Step) -> None:
        waiting_ns = time.monotonic_ns()
        self._status.begin_step(step.received.plan.step_id, waiting_ns)
        result = step.refused.strike(self._runner.collect(step.launched), step.refusals)
        end_ns = time.monotonic_ns()
        self._status.end_step(end_ns - waiting_ns)
        message = write_answer(step.received, result, step.begin_ns, end_ns, self._log)
        self._stream.send_result(message)
