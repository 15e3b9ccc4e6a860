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

Refusal = type[RequestError] | None


def possible_refusals(scheduler: Scheduler, job: Job) -> set[Refusal]:
    """Return what may be said to a request; None takes it. More than one only of windows."""
    limits = scheduler.limits
    if (job.tenant, job.name) in scheduler._state.live:
        return {DuplicateRequestError}
    if not 1 <= job.width <= limits.max_num_seqs or (job.beam and job.n != 1):
        return {InvalidRequestError}
    if len(job.prompt) + (job.max_output or 1) > limits.max_model_len:
        return {InvalidRequestError}
    refusals: set[Refusal] = {QueueFullError if _is_full(scheduler, job) else None}
    fit = fits(scheduler, job, job.width)
    if fit is None:
        return refusals | {NeverFitsError}
    return refusals if fit else {NeverFitsError}


def _is_full(scheduler: Scheduler, job: Job) -> bool:
    limits, most = scheduler.limits, scheduler.limits.max_waiting_tokens
    if scheduler.num_waiting >= limits.max_waiting_requests:
        return True
    waiting = sum(each.num_tokens for each in scheduler._state.waiting)
    return bool(most and scheduler.num_waiting and waiting + len(job.prompt) > most)


def fits(scheduler: Scheduler, job: Job, width: int, num_output: int = 0) -> bool | None:
    """Whether so many sequences of a request fit the pool, less what may be pinned of it.

    None: they might, since windows let go of blocks.
    """
    pool = scheduler.pool
    if pool is None:
        return True
    block_size = scheduler.limits.block_size
    usable = (pool.num_blocks - pool._pins.max_blocks) // len(pool.groups)
    known = -(-(len(job.prompt) + num_output) // block_size)
    if max(known, job.num_blocks(block_size, width)) <= usable:
        return True
    return False if job.beam or all(each.sees_all for each in pool.groups) else None
