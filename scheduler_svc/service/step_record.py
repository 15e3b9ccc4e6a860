"""What one step did and where its time went, as the engine saw it."""

from collections import deque
from dataclasses import dataclass
from typing import Protocol

from scheduler_svc.core.request import RequestKey


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step from plan to emitted tokens.

    Stamps are nanoseconds of the scheduler's monotonic clock, in the order of the fields.
    Durations of the worker are nanoseconds of its own clock, and never compared with stamps.
    """

    step_id: int
    epoch_number: int

    num_rows: int
    """Rows that ran."""

    num_tokens: int
    """Tokens that ran, over all rows."""

    num_sampled: int
    """Tokens sampled for live requests. Of a beam search one for each beam."""

    num_preempted: int
    """Requests that lost their blocks for this step."""

    plan_bytes: int
    result_bytes: int

    running: int
    """Requests that held blocks when the result was applied."""

    waiting: int
    """Requests in the queue at that time."""

    schedule_begin_ns: int
    schedule_end_ns: int
    encoded_ns: int
    sent_ns: int
    result_received_ns: int
    decoded_ns: int
    applied_ns: int
    emitted_ns: int

    wait_ns: int
    """The plan lay in the worker, behind its predecessor."""

    prepare_ns: int
    forward_ns: int
    sample_ns: int

    execute_ns: int
    """From begin to end: prepare, forward, sample, and what lies between."""

    codec_ns: int
    """The worker decoded the plan and encoded the result."""

    request_keys: tuple[RequestKey, ...]
    """At most 16 of the requests that sampled."""

    traceparent: str
    """W3C trace context that went out with the plan. Empty: not traced beforehand."""

    @property
    def wire_ns(self) -> int:
        """Round trip less the worker's time; not below 0, the clocks being two."""
        round_trip = self.result_received_ns - self.encoded_ns
        return max(0, round_trip - self.wait_ns - self.execute_ns - self.codec_ns)


class StepObserver(Protocol):
    """Someone who wants to know of each step."""

    def step(self, record: StepRecord) -> None:
        """Note a step. Called in the engine's loop: takes microseconds."""


class StepTracer(StepObserver, Protocol):
    """An observer that may also choose beforehand to trace a step."""

    def traceparent(self, step_id: int) -> str:
        """Return the W3C trace context to send with this step's plan. Empty: none."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Where recent steps spent their time: means in seconds, as pagemill.v1.StepTimes."""

    steps: int
    schedule_s: float
    encode_s: float
    wire_s: float
    worker_wait_s: float
    model_s: float
    emit_s: float
    step_s: float


class RecentSteps:
    """The last steps' records, and their means."""

    def __init__(self, capacity: int = 1024) -> None:
        self._records: deque[StepRecord] = deque(maxlen=capacity)

    def step(self, record: StepRecord) -> None:
        """Note a step; the oldest is forgotten."""
        self._records.append(record)

    def times(self) -> StepTimes | None:
        """Return the means, or None before the first step.

        Cost: O(records), some 0.5 ms at 1,024; asked for by people, not by the loop.
        """
        records = self._records
        if not records:
            return None
        to_mean_s = 1e-9 / len(records)
        return StepTimes(
            steps=len(records),
            schedule_s=to_mean_s * sum(r.schedule_end_ns - r.schedule_begin_ns for r in records),
            encode_s=to_mean_s
            * sum(
                r.encoded_ns - r.schedule_end_ns + r.decoded_ns - r.result_received_ns
                for r in records
            ),
            wire_s=to_mean_s * sum(r.wire_ns for r in records),
            worker_wait_s=to_mean_s * sum(r.wait_ns for r in records),
            model_s=to_mean_s * sum(r.execute_ns for r in records),
            emit_s=to_mean_s * sum(r.emitted_ns - r.decoded_ns for r in records),
            step_s=to_mean_s * self._busy_ns(),
        )

    def _busy_ns(self) -> int:
        """Sum the times from one result to the next; behind an idle time, from the plan on."""
        busy_ns = 0
        before: StepRecord | None = None
        for record in self._records:
            begin_ns = record.schedule_begin_ns
            if before is not None and begin_ns <= before.emitted_ns:
                begin_ns = before.result_received_ns
            busy_ns += record.result_received_ns - begin_ns
            before = record
        return busy_ns
