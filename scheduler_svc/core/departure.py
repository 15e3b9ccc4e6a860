"""How a request leaves its row: preempted, to come back, or ended."""

from dataclasses import replace

from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.request import FinishReason, Request
from scheduler_svc.core.state import SchedulerState


def preempt(
    state: SchedulerState, request: Request, now_ns: int, *, keep_in_flight: bool = True
) -> None:
    """Take a running request's blocks; it waits, with its outputs, where its precedence is.

    Beams leave all together, and what they sample in flight is sampled again.
    """
    root = request.root
    if root.beam is not None and not root.awaits_fork:
        _leave_beams(state, root)
        request = root
    else:
        row = state.rows.row_of(request)
        generation = int(state.rows.generation[row])
        if keep_in_flight and root.beam is None:
            request.num_pending_tokens = state.journal.adopt(request, row, generation)
        num_drafted = state.journal.num_drafted(row, generation)
        request.computed_before_preemption = int(state.rows.num_computed[row]) - num_drafted
        _leave_row(state, request)
    request.preemption_times_ns.append(now_ns)
    state.counters.preemptions += 1
    state.waiting.add(request)


def end(
    state: SchedulerState, request: Request, reason: FinishReason, now_ns: int
) -> list[Request]:
    """Finish a live request, wherever it is. Return who ended.

    That is the whole family, if it has not been forked yet or consists of beams.
    """
    root = request.root
    if root.beam is not None and not root.awaits_fork:
        if root.row is None:
            state.waiting.remove(root)
        else:
            _leave_beams(state, root)
        close(state, root, reason, now_ns)
        return [root]
    if request.awaits_fork:
        return _end_unforked(state, request, reason, now_ns)
    if request.row is not None:
        _leave_row(state, request)
    else:
        state.waiting.remove(request)
    close(state, request, reason, now_ns)
    return [request]


def _end_unforked(
    state: SchedulerState, request: Request, reason: FinishReason, now_ns: int
) -> list[Request]:
    """Finish a member before its fork; the root takes all with it."""
    root = request.root
    if request is not root:
        if root.num_reserved_rows:
            root.num_reserved_rows -= 1
            state.rows.num_reserved -= 1
        close(state, request, reason, now_ns)
        return [request]
    if request.row is not None:
        _leave_row(state, request)
    else:
        state.waiting.remove(request)
    ended = [each for each in request.members if each.finish_reason is None]
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
        state.beams.pop(request, None)


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


def _leave_beams(state: SchedulerState, root: Request) -> None:
    """Take rows and blocks from all beams of a family, and forget what they would have gone on."""
    family = state.beams[root]
    family.received.clear()
    family.blocked.clear()
    rows = [state.rows.row_of(lane) for lane in family.lanes]
    for row in rows:
        # Nobody stays to take over a parent's row, so no fork may name it any more.
        fork = state.pending_forks.pop(row, None)
        if fork is not None and fork.is_new:
            state.pending_forks[row] = replace(fork, parent_row=row)
    for lane, row in zip(family.lanes, rows, strict=True):
        lane.computed_before_preemption = int(state.rows.num_computed[row])
        _leave_row(state, lane)
