"""What is said of a step that has ended: to the scheduler, and to the log."""

import time

from pagemill.v1 import worker_pb2
from worker_svc.runtime.step_plan import StepResult
from worker_svc.service import wire
from worker_svc.service.logs import Logger


def write_answer(
    received: wire.ReceivedPlan, result: StepResult, begin_ns: int, end_ns: int, log: Logger
) -> worker_pb2.StepResult:
    """Return the answer to a plan whose step ran from `begin_ns` to `end_ns`, and log it."""
    plan = received.plan
    message = wire.write_result(result, received.epoch)
    message.timing.wait_ns = begin_ns - received.arrived_ns - received.decode_ns
    message.timing.codec_ns = received.decode_ns + time.monotonic_ns() - end_ns
    for row, reason in result.row_errors:
        log.warning("row failed", step_id=plan.step_id, row=row, reason=reason)
    log.debug(
        "step",
        step_id=plan.step_id,
        admitted=[row.request_id for row in plan.admitted],
        num_sampled=len(result.tokens),
        ms=round((end_ns - begin_ns) / 1e6, 3),
    )
    return message
