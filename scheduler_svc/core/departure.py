"""How a request leaves its row: preempted, to come back, or ended."""

from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.request import FinishReason, Request
from scheduler_svc.core.state import SchedulerState


def preempt(
    state: SchedulerState, request: Request, now_ns: int, *, keep_in_flight: bool = True
) -> None:
    """Take a running request's blocks; it waits, with its outputs, where its precedence is."""
    row = state.rows.row_of(request)
    if keep_in_flight:
        generation = int(state.rows.generation[row])
        request.num_pending_tokens = state.journal.adopt(request, row, generation)
    request.computed_before_preemption = int(state.rows.num_computed[row])
    request.preemption_times_ns.append(now_ns)
    _leave_row(state, request)
    state.counters.preemptions += 1
    state.waiting.add(request)


def end(state: SchedulerState, request: Request, reason: FinishReason, now_ns: int) -> None:
    """Finish a live request, wherever it is."""
    if request.row is not None:
        _leave_row(state, request)
    else:
        state.waiting.remove(request)
    state.waiting.forget(request)
    del state.live[request.key]
    if request.first_step_id is not None and request.last_step_id is None:
        request.last_step_id = max(0, state.next_step_id - 1)
    request.finish_reason = reason
    request.finished_ns = now_ns


def _leave_row(state: SchedulerState, request: Request) -> None:
    """Give row and blocks back, the last block first, so that prefixes die last."""
    if state.pool is None:
        raise InvariantError("a request runs without a pool")
    state.released_rows.append(state.rows.give_back(request))
    state.pool.release(request.blocks[::-1])
    request.blocks = []
