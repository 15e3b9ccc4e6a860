"""How busy the engine is: the scheduler's numbers as the door tells them."""

from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.service.server_state import CacheState, Load, Totals
from scheduler_svc.service.step_record import StepTimes


def load_of(scheduler: Scheduler, recent: StepTimes | None, num_adapters: int) -> Load:
    """Return what a scheduler holds and has counted; `recent`: the means over its last steps."""
    counters = scheduler.counters
    pool = scheduler.pool
    return Load(
        running=scheduler.num_running,
        waiting=scheduler.num_waiting,
        used_blocks=pool.num_used if pool else 0,
        idle_cached_blocks=pool.num_idle_cached if pool else 0,
        free_blocks=pool.num_empty if pool else 0,
        total_blocks=pool.num_blocks if pool else 0,
        waiting_tokens=scheduler.num_waiting_tokens,
        totals=Totals(
            steps=counters.steps,
            prompt_tokens=counters.prompt_tokens,
            generation_tokens=counters.generation_tokens,
            prefix_queries=counters.prefix_queries,
            prefix_hits=counters.prefix_hits,
            preemptions=counters.preemptions,
            recomputed_tokens=counters.recomputed_tokens,
            draft_tokens=counters.draft_tokens,
            accepted_draft_tokens=counters.accepted_draft_tokens,
        ),
        recent=recent,
        adapters=num_adapters,
        cache=CacheState(
            hit_rate=scheduler.hit_rate,
            missed_tokens=dict(counters.prefix_misses),
            pinned_blocks=pool.num_pinned if pool else 0,
            broken_pins=scheduler.num_broken_pins,
        ),
    )
