"""A step under way: its plan, its result, and when what was done to it."""

from dataclasses import dataclass

from scheduler_svc.core.step_plan import StepOutcome, StepPlan
from scheduler_svc.service.group_events import StepArrived
from scheduler_svc.service.step_record import StepRecord
from scheduler_svc.service.worker_link import SentPlan

MAX_NAMED_REQUESTS = 16
"""Requests that a step record names."""


@dataclass(frozen=True, slots=True)
class Flight:
    """A plan without a result."""

    plan: StepPlan
    sent: SentPlan
    schedule_begin_ns: int
    schedule_end_ns: int
    traceparent: str


@dataclass(frozen=True, slots=True)
class Landing:
    """A step whose result is applied, but whose tokens are not yet handed out."""

    flight: Flight
    arrived: StepArrived
    outcome: StepOutcome
    applied_ns: int

    def record(self, *, running: int, waiting: int, emitted_ns: int) -> StepRecord:
        """Return all that is known of the step, once its tokens are handed out."""
        flight, arrived, outcome = self.flight, self.arrived, self.outcome
        timing = arrived.answer.timing
        sampled = [*outcome.requests[:MAX_NAMED_REQUESTS], *outcome.searching]
        return StepRecord(
            step_id=outcome.step_id,
            epoch_number=flight.sent.epoch_number,
            num_rows=flight.plan.num_rows,
            num_tokens=flight.plan.num_tokens,
            num_sampled=len(outcome.tokens) + len(outcome.searching),
            num_preempted=flight.plan.num_preempted,
            plan_bytes=flight.sent.num_bytes,
            result_bytes=arrived.num_bytes,
            running=running,
            waiting=waiting,
            schedule_begin_ns=flight.schedule_begin_ns,
            schedule_end_ns=flight.schedule_end_ns,
            encoded_ns=flight.sent.encoded_ns,
            sent_ns=flight.sent.sent_ns,
            result_received_ns=arrived.received_ns,
            decoded_ns=arrived.decoded_ns,
            applied_ns=self.applied_ns,
            emitted_ns=emitted_ns,
            wait_ns=timing.wait_ns,
            prepare_ns=timing.prepare_ns,
            forward_ns=timing.forward_ns,
            sample_ns=timing.sample_ns,
            execute_ns=timing.execute_ns,
            codec_ns=timing.codec_ns,
            request_keys=tuple(dict.fromkeys(each.key for each in sampled))[:MAX_NAMED_REQUESTS],
            traceparent=flight.traceparent,
        )
