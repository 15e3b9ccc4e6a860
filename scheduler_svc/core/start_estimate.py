"""When a request could start at the earliest: what refuses a deadline that cannot be kept.

Everything here errs towards an earlier start. Counted is only what must happen before, of
requests that will still be there: prompts that running requests have yet to compute, tokens
that those ahead in line cannot find in the cache, and rows that must become free.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.block_hash import BlockHash
from scheduler_svc.core.errors import HopelessDeadlineError
from scheduler_svc.core.limits import Limits
from scheduler_svc.core.request import Request
from scheduler_svc.core.skip_ahead import MAX_HELD
from scheduler_svc.core.state import SchedulerState
from scheduler_svc.core.step_pace import StepPace
from scheduler_svc.core.step_plan import Int32Array

Int64Array = npt.NDArray[np.int64]

FACTOR = 2
"""The earliest start must be this many times as far away as the last that is in time."""

MAX_LOOKED_AT = 4096
"""Requests ahead that are looked at; those behind them count as nothing."""

MAX_NAMES = 16384
"""Blocks whose names are looked up. Cost: 0.1 us each, and hashing those not hashed before."""


@dataclass(frozen=True, slots=True)
class Obstacles:
    """What must happen before a request can start, at the least."""

    num_tokens: int
    """Tokens to run."""

    num_row_steps: int
    """Steps of running requests that must end to free a row, summed over rows."""

    def wait_ns(self, limits: Limits, pace: StepPace) -> int:
        """Return how long that takes at the least."""
        full_steps = self.num_tokens // limits.max_num_batched_tokens
        row_steps = self.num_row_steps // limits.max_num_seqs
        return max(
            full_steps * pace.full_ns(limits.max_num_batched_tokens),
            row_steps * pace.fastest_ns(),
        )


def check_start(state: SchedulerState, request: Request, pace: StepPace, now_ns: int) -> None:
    """Refuse a request that clearly cannot start in time. It has its precedence already.

    Cost: O(rows) if all that waits could be run in time, hits or not.

    Raises: HopelessDeadlineError, with the numbers.
    """
    fastest_ns = pace.fastest_ns()
    if request.deadline_ns is None or not fastest_ns or not len(state.waiting):
        return
    # It needs a step of its own, at the least.
    last_start_ns = request.deadline_ns - fastest_ns
    available_ns = max(0, last_start_ns - now_ns)
    limits = state.limits
    tokens, steps = _running(state, request)
    most = Obstacles(
        int(tokens.sum()) + state.waiting.num_tokens, int(steps.sum()) + len(state.waiting)
    )
    if most.wait_ns(limits, pace) <= FACTOR * available_ns:
        return
    ahead = state.waiting.ahead_of(request)
    waiting = [*_uncached(state, ahead, last_start_ns)]
    obstacles = _least(tokens, steps, waiting, limits)
    wait_ns = obstacles.wait_ns(limits, pace)
    if wait_ns <= FACTOR * available_ns:
        return
    raise HopelessDeadlineError(
        f"the deadline is in {(request.deadline_ns - now_ns) / 1e9:.3f} s, the earliest start in "
        f"{wait_ns / 1e9:.3f} s: {len(ahead)} requests wait before this one, and "
        f"{obstacles.num_tokens} tokens run before it, at most {limits.max_num_batched_tokens} in "
        f"{pace.full_ns(limits.max_num_batched_tokens) / 1e9:.3f} s"
    )


def _least(tokens: Int32Array, steps: Int64Array, waiting: list[int], limits: Limits) -> Obstacles:
    """Return what must happen before everyone else is admitted, or passed, and a row is free.

    As many of those that wait as may be passed are left out, the largest.

    Shapes: tokens, steps [running rows]. `waiting` has the tokens of each request ahead.
    """
    stay = sorted(waiting)[: max(0, len(waiting) - MAX_HELD)]
    num_ended = len(steps) + len(stay) - (limits.max_num_seqs - 1)
    # Who waits needs at least one step to end, and any of those ahead may be among the ended.
    row_steps = np.sort(np.concatenate([steps, np.ones(len(stay), dtype=np.int64)]))
    return Obstacles(int(tokens.sum()) + sum(stay), int(row_steps[: max(0, num_ended)].sum()))


def _running(state: SchedulerState, request: Request) -> tuple[Int32Array, Int64Array]:
    """Return tokens to compute and steps to the earliest end of each row that goes before."""
    rows = state.rows
    behind = {rows.row_of(other) for other in state.waiting.behind(request, rows.running)}
    order = np.array([row for row in rows.order.tolist() if row not in behind], dtype=np.int32)
    known = rows.num_tokens[order] + rows.num_pending[order]
    gap = np.where(known < rows.limit[order], known - rows.num_computed[order], 0)
    to_stop = np.minimum(rows.first_stop[order], rows.limit[order])
    tokens: Int32Array = np.clip(gap, 0, state.limits.max_row_tokens).astype(np.int32)
    return tokens, np.maximum(to_stop - known, 0).astype(np.int64)


def _uncached(state: SchedulerState, ahead: Sequence[Request], until_ns: int) -> Iterator[int]:
    """Yield the tokens that requests ahead must run to be admitted, whatever they may hit.

    Left out are those whose deadline is by `until_ns`: they may be gone then.
    """
    prefixes, pool, most = state.prefixes, state.pool, state.limits.max_row_tokens
    block_size, num_names = state.limits.block_size, 0
    # Names that will be there, since others run before.
    coming: set[BlockHash] = set()
    for other in state.rows.running:
        num_published = int(state.rows.num_published[state.rows.row_of(other)])
        coming.update(prefixes.names(other)[num_published:])
    for other in ahead[:MAX_LOOKED_AT]:
        if other.deadline_ns is not None and other.deadline_ns <= until_ns:
            continue
        if num_names > MAX_NAMES:
            yield 1
            continue
        names = prefixes.names(other)
        num_names += len(names)
        hits = 0
        if other.read_cache and pool is not None:
            hits = sum(name in coming or pool.lookup(name) is not None for name in names)
        coming.update(names)
        yield min(max(1, other.num_tokens - hits * block_size), most)
