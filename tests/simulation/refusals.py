"""Which requests a scheduler must refuse, found out independently of it."""

from scheduler_svc.core.errors import (
    DuplicateRequestError,
    InvalidRequestError,
    NeverFitsError,
    QueueFullError,
    RequestError,
)
from scheduler_svc.core.scheduler import Scheduler
from simulation.load import Job


def expected_refusal(scheduler: Scheduler, job: Job) -> type[RequestError] | None:
    limits = scheduler.limits
    if (job.tenant, job.name) in scheduler._state.live:
        return DuplicateRequestError
    if not 1 <= job.width <= limits.max_num_seqs or (job.beam and job.n != 1):
        return InvalidRequestError
    if len(job.prompt) + (job.max_output or 1) > limits.max_model_len:
        return InvalidRequestError
    if not fits(scheduler, job, job.width):
        return NeverFitsError
    if scheduler.num_waiting >= limits.max_waiting_requests:
        return QueueFullError
    most = limits.max_waiting_tokens
    if most and scheduler.num_waiting:
        waiting = sum(each.num_tokens for each in scheduler._state.waiting)
        return QueueFullError if waiting + len(job.prompt) > most else None
    return None


def fits(scheduler: Scheduler, job: Job, width: int, num_output: int = 0) -> bool:
    """Whether so many sequences of a request fit the pool, less what may be pinned of it."""
    pool = scheduler.pool
    if pool is None:
        return True
    block_size = scheduler.limits.block_size
    usable = pool.num_blocks - pool._pins.max_blocks
    known = -(-(len(job.prompt) + num_output) // block_size)
    return max(known, job.num_blocks(block_size, width)) <= usable
