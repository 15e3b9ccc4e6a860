"""What the scheduler knows, as lines for a person who must find out why nothing moves."""

from collections.abc import Iterator
from itertools import islice

from scheduler_svc.core.free_block_queue import NULL_BLOCK
from scheduler_svc.core.group_blocks import num_wanted
from scheduler_svc.core.request import Request
from scheduler_svc.core.state import SchedulerState

MAX_REQUESTS = 64
"""Running and waiting requests that are described, of each; the others are counted."""


def dump(state: SchedulerState, now_ns: int) -> str:
    """Return the state as text: limits, pool, steps in flight, running and waiting requests.

    Changes nothing, and raises nothing on a state that contradicts itself.
    """
    return "\n".join(_lines(state, now_ns))


def _lines(state: SchedulerState, now_ns: int) -> Iterator[str]:
    limits, pool = state.limits, state.pool
    yield (
        f"limits: {limits.max_num_seqs} rows, {limits.max_num_batched_tokens} tokens a step, "
        f"{limits.max_row_tokens} of one row, {limits.max_model_len} of one request, "
        f"{limits.max_long_prefills or 'any number of'} long prefills, "
        f"{limits.pipeline_depth} steps in flight"
    )
    if pool is None:
        yield "pool: no worker has joined"
    else:
        yield (
            f"pool: {pool.num_blocks} blocks of {limits.block_size}, {pool.num_used} used, "
            f"{pool.num_idle_cached} idle with content, {pool.num_empty} empty"
        )
    yield f"group: {'takes plans' if state.connected else 'takes no plans'}"
    yield f"in flight: {len(state.journal)} steps, the next is {state.next_step_id}"
    for step in state.journal:
        yield (
            f"  step {step.step_id}: {len(step.rows)} rows run, {int(step.samples.sum())} sample, "
            f"{len(step.orphans)} have lost their row, {len(step.published)} names rest on it"
        )
    yield f"running: {len(state.rows.running)}"
    for request in islice(state.rows.running, MAX_REQUESTS):
        yield f"  {_named(request, now_ns)}: {_row(state, request)}"
    yield f"waiting: {len(state.waiting)}, {state.waiting.num_tokens} tokens"
    for request in islice(state.waiting, MAX_REQUESTS):
        yield f"  {_named(request, now_ns)}: {_lack(state, request)}"


def _named(request: Request, now_ns: int) -> str:
    tenant = f" of {request.tenant!r}" if request.tenant else ""
    facts = f"here for {(now_ns - request.arrival_ns) / 1e9:.3f} s"
    if request.deadline_ns is not None:
        facts += f", deadline in {(request.deadline_ns - now_ns) / 1e9:.3f} s"
    if request.num_preemptions:
        facts += f", preempted {request.num_preemptions} times"
    return f"{request.request_id!r}{tenant} ({facts})"


def _row(state: SchedulerState, request: Request) -> str:
    row, rows = request.row, state.rows
    if row is None:
        return "runs without a row"
    return (
        f"row {row}, {rows.num_tokens[row]} tokens known, {rows.num_pending[row]} pending, "
        f"{rows.num_computed[row]} computed, ends at {rows.limit[row]}, "
        f"{sum(block != NULL_BLOCK for block in request.blocks)} blocks"
    )


def _lack(state: SchedulerState, request: Request) -> str:
    """Say what a waiting request lacks: the first of its tokens, a row, or blocks."""
    if request.num_pending_tokens:
        return f"{request.num_pending_tokens} of its tokens are in flight"
    lacks = []
    if not state.rows.has_room:
        lacks.append(f"a row, {state.limits.max_num_seqs} are taken")
    if (pool := state.pool) is not None:
        # The watermark of a resumed request counts only beside others.
        spare = int(state.limits.watermark * pool.num_blocks) if request.num_preemptions else 0
        # Hits are there, be they idle or not: what it lacks is beside them.
        hits = state.prefixes.find(request, pool)
        wanted = num_wanted(request.num_tokens, hits, state.limits, pool)
        wanted += spare - pool.count_idle(hits)
        if wanted > pool.num_free:
            lacks.append(f"{wanted - pool.num_free} of {wanted} blocks")
    lacking = " and ".join(lacks) or "nothing but its turn"
    return f"{request.num_tokens} tokens known, lacks {lacking}"
