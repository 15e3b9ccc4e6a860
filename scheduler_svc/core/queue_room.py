"""Whether one more request may wait, and when it is worth asking again."""

from scheduler_svc.core.errors import QueueFullError
from scheduler_svc.core.request import Request
from scheduler_svc.core.state import SchedulerState

SHORTEST_RETRY_S, LONGEST_RETRY_S = 1.0, 30.0


def check_room(state: SchedulerState, request: Request, now_ns: int) -> None:
    """Refuse a request that the queue has no room for.

    Raises: QueueFullError, with the numbers and when to try again.
    """
    count, tokens = len(state.waiting), state.waiting.num_tokens
    limits = state.limits
    if count >= limits.max_waiting_requests:
        raise QueueFullError(
            f"{count} requests wait, at most {limits.max_waiting_requests} may",
            _retry_after_s(state, now_ns),
        )
    most = limits.max_waiting_tokens
    if most is not None and count and tokens + request.num_tokens > most:
        raise QueueFullError(
            f"{tokens} tokens wait, with the {request.num_tokens} of this request they would "
            f"be more than {most}",
            _retry_after_s(state, now_ns),
        )


def _retry_after_s(state: SchedulerState, now_ns: int) -> float:
    """Return the seconds in which a quarter of the queue will have been admitted.

    As long as the first in line has waited, so long it takes the whole queue to pass.
    """
    first = next(iter(state.waiting))
    return min(max((now_ns - first.arrival_ns) / 4e9, SHORTEST_RETRY_S), LONGEST_RETRY_S)
