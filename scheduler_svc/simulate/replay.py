"""From options to a report."""

from collections.abc import Callable

from scheduler_svc.core.eviction import EVICTION_POLICIES
from scheduler_svc.core.limits import Limits
from scheduler_svc.core.victims import VICTIM_POLICIES
from scheduler_svc.simulate.beam_forks import read_parents
from scheduler_svc.simulate.contiguous import RESERVATIONS, ContiguousReplay
from scheduler_svc.simulate.options import Options
from scheduler_svc.simulate.paged import PagedReplay
from scheduler_svc.simulate.report import Report
from scheduler_svc.simulate.step_cost import StepCost
from scheduler_svc.simulate.workload import (
    LENGTHS,
    Arrival,
    at_once,
    poisson,
    read_trace,
    repeated,
    searched,
)

_DEFAULT_REQUESTS = 1000


def make_load(options: Options) -> list[Arrival]:
    """Return the requests to replay, in order of arrival.

    Raises: TraceError if there is a trace and it cannot be read.
    """
    if options.trace is not None:
        trace = read_trace(options.trace, options.chunk_tokens)
        load = trace[: options.requests]
    else:
        count = options.requests or _DEFAULT_REQUESTS
        load = LENGTHS[options.lengths or ""].draw(count, options.seed)
    if options.own_lengths and options.lengths is not None:
        load = LENGTHS[options.lengths].draw_siblings(load, options.n, options.seed)
    elif options.n > 1:
        load = repeated(load, options.n)
    if options.beam_width is not None:
        load = searched(load, read_parents(options.beam_width), options.seed)
    if options.saturate:
        return at_once(load)
    return load if options.rate is None else poisson(load, options.rate, options.seed)


def replay(
    options: Options,
    load: list[Arrival],
    cost: StepCost,
    progress: Callable[[float], None] = lambda _: None,
) -> Report:
    """Replay a load against the allocator of the options."""
    if options.allocator != "paged":
        return ContiguousReplay(
            load,
            RESERVATIONS[options.allocator],
            options.slots,
            cost,
            max_model_len=options.max_model_len,
            max_num_seqs=options.max_num_seqs,
        ).run(progress)
    return make_paged(options, load, cost).run(progress)


def make_paged(options: Options, load: list[Arrival], cost: StepCost) -> PagedReplay:
    """Return a replay of the real core, not begun."""
    limits = Limits(
        block_size=options.block_size,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=max(options.max_num_batched_tokens, options.max_num_seqs),
        max_model_len=options.max_model_len,
        max_waiting_requests=len(load),
        pipeline_depth=options.pipeline_depth,
    )
    return PagedReplay(
        load,
        limits,
        options.slots,
        cost,
        chunk_tokens=options.chunk_tokens,
        enable_prefix_caching=options.enable_prefix_caching,
        choose_victim=VICTIM_POLICIES[options.preemption_victim],
        eviction=EVICTION_POLICIES[options.eviction_policy],
    )
