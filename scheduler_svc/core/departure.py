"""How a request leaves its row: preempted, to come back, or ended."""

from dataclasses import replace

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


def end(
    state: SchedulerState, request: Request, reason: FinishReason, now_ns: int
) -> list[Request]:
    """Finish a live request, wherever it is. Return who ended: of a family not yet forked, all."""
    if request.awaits_fork:
        return end_unforked(state, request, reason, now_ns)
    if request.row is not None:
        _leave_row(state, request)
    else:
        state.waiting.remove(request)
    close(state, request, reason, now_ns)
    return [request]


def end_unforked(
    state: SchedulerState, request: Request, reason: FinishReason, now_ns: int
) -> list[Request]:
    """Finish a member before its fork; the root takes all with it."""
    ended = [request]
    if request is not request.root:
        unreserve_row(state, request.root)
    elif request.row is not None:
        _leave_row(state, request)
    else:
        state.waiting.remove(request)
    if request is request.root:
        ended += [each for each in request.family[1:] if each.finish_reason is None]
    for each in ended:
        each.error = request.error
        close(state, each, reason, now_ns)
    return ended


def close(state: SchedulerState, request: Request, reason: FinishReason, now_ns: int) -> None:
    """Note the end of a request that has neither a row nor a place in the queue."""
    state.waiting.forget(request)
    request.awaits_fork = False
    request.finish_reason = reason
    request.finished_ns = now_ns
    if request.first_step_id is not None and request.last_step_id is None:
        request.last_step_id = max(0, state.next_step_id - 1)
    if all(each.finish_reason is not None for each in request.members):
        del state.live[request.key]


def unreserve_row(state: SchedulerState, root: Request) -> None:
    """Give back one of the rows that were kept for the members of a root that runs."""
    if root.num_reserved_rows:
        root.num_reserved_rows -= 1
        state.rows.num_reserved -= 1


def _leave_row(state: SchedulerState, request: Request) -> None:
    """Give row and blocks back, the last block first, so that prefixes die last."""
    if state.pool is None:
        raise InvariantError("a request runs without a pool")
    row = state.rows.give_back(request)
    has_forks = state.families or state.shared_tails or state.pending_forks
    if not has_forks or not _leave_forks(state, request, row):
        state.released_rows.append(row)
    state.pool.release(request.blocks[::-1])
    request.blocks = []


def _leave_forks(state: SchedulerState, request: Request, row: int) -> bool:
    """Forget what a left row was to its family. True if workers need not release the row.

    A plan may not release the row that it forks others from. So one of these takes it instead.
    """
    state.shared_tails.discard(row)
    if state.families.pop(row, None) is not None:
        state.rows.num_reserved -= request.num_reserved_rows
        request.num_reserved_rows = 0
    left = state.pending_forks.pop(row, None)
    if left is not None and left.is_new:
        return True
    children = [each for each, fork in state.pending_forks.items() if fork.parent_row == row]
    if not children:
        return False
    heir = min((state.rows.owner(each) for each in children), key=lambda each: each.precedence)
    vacated = state.rows.relocate(heir, row)
    state.pending_forks[row] = replace(state.pending_forks.pop(vacated), is_new=False)
    if vacated in state.shared_tails:
        state.shared_tails.remove(vacated)
        state.shared_tails.add(row)
    return True
