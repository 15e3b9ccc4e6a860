"""The worker's life between two joins: plans in, steps run, results out."""

import time

from pagemill.v1 import worker_pb2
from worker_svc.errors import InvariantError
from worker_svc.service import wire
from worker_svc.service.adapter_loading import AdapterLoading
from worker_svc.service.logs import Logger
from worker_svc.service.model_host import StepRunner
from worker_svc.service.ordered_changes import OrderedChanges
from worker_svc.service.plan_order import PlanOrder
from worker_svc.service.refused_rows import RefusedRows
from worker_svc.service.shutdown import Shutdown
from worker_svc.service.step_answer import write_answer
from worker_svc.service.step_stream import StepStream
from worker_svc.service.worker_status import Phase, WorkerStatus


class StepLoop:
    """Runs the plans of one stream, each to its end, in the thread that calls `run`."""

    def __init__(
        self,
        runner: StepRunner,
        adapters: AdapterLoading,
        status: WorkerStatus,
        shutdown: Shutdown,
        log: Logger,
        *,
        answers: bool = True,
    ) -> None:
        """Answer plans, or leave that to rank 0."""
        self._answers = answers
        self._runner = runner
        self._adapters = adapters
        self._status = status
        self._shutdown = shutdown
        self._log = log
        self._order = PlanOrder()
        self._refused = RefusedRows()

    def run(self, stream: StepStream) -> None:
        """Run plans until the scheduler or the process is asked to stop.

        Raises: StreamLostError, RefusedError or RanksLostError as the stream does;
            InvariantError if a plan breaks the order; whatever a step raises.
        """
        changes = OrderedChanges(self._adapters, stream.send_adapter_answer)
        with self._shutdown.waking(stream.wake):
            # Without a deadline: an idle scheduler sends nothing, and a lost one ends the stream.
            while not self._shutdown.asked:
                match stream.receive(timeout_s=None):
                    case wire.ReceivedPlan() as received:
                        result = self._step(received)
                        if self._answers:
                            stream.send_result(result)
                        else:
                            stream.note_answered()
                        changes.note_plan()
                    case worker_pb2.AdapterChange() as change:
                        changes.take(change)
                    case worker_pb2.StopWorker():
                        self._log.info("the scheduler stops this worker")
                        break
                    case worker_pb2.JoinAck() | worker_pb2.Rendezvous() as message:
                        raise InvariantError(f"a {type(message).__name__} came among plans")
        self._status.enter(Phase.STOPPING)

    def _step(self, received: wire.ReceivedPlan) -> worker_pb2.StepResult:
        begin_ns = time.monotonic_ns()
        plan = received.plan
        self._order.check(plan.step_id, received.epoch, reset=plan.reset)
        self._status.begin_step(plan.step_id, begin_ns)
        refusals = self._refused.follow(plan, received.refusals)
        result = self._refused.strike(self._runner.run(plan), refusals)
        end_ns = time.monotonic_ns()
        self._status.end_step(end_ns - begin_ns)

        return write_answer(received, result, begin_ns, end_ns, self._log)
