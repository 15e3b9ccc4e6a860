"""Step records with round numbers, for tests of those who observe steps."""

from time import monotonic_ns

from scheduler_svc.core.request import RequestKey
from scheduler_svc.service.step_record import StepRecord

MS = 1_000_000


def step_record(
    step_id: int = 0,
    *,
    begin_ns: int | None = None,
    execute_ms: int = 10,
    num_preempted: int = 0,
    request_keys: tuple[RequestKey, ...] = (),
    traceparent: str = "",
) -> StepRecord:
    """Return the record of a step that began some time ago.

    In milliseconds: schedule 1, encode 2, wire 4, worker's wait 3, execute as given, decode 1,
    emit 5, of which applying took 2. The worker prepared for 1 and sampled for 2.
    """
    begin = monotonic_ns() - 1000 * MS if begin_ns is None else begin_ns
    received = begin + (1 + 2 + 4 + 3 + execute_ms) * MS
    return StepRecord(
        step_id=step_id,
        epoch_number=3,
        num_rows=4,
        num_tokens=40,
        num_sampled=2,
        num_preempted=num_preempted,
        plan_bytes=100,
        result_bytes=50,
        running=4,
        waiting=1,
        schedule_begin_ns=begin,
        schedule_end_ns=begin + MS,
        encoded_ns=begin + 3 * MS,
        sent_ns=begin + 3 * MS,
        result_received_ns=received,
        decoded_ns=received + MS,
        applied_ns=received + 3 * MS,
        emitted_ns=received + 6 * MS,
        wait_ns=3 * MS,
        prepare_ns=MS,
        forward_ns=(execute_ms - 3) * MS,
        sample_ns=2 * MS,
        execute_ns=execute_ms * MS,
        codec_ns=0,
        request_keys=request_keys,
        traceparent=traceparent,
    )
