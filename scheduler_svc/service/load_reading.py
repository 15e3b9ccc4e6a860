"""How busy the core is, as the door tells it."""

from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.service.engine_door import CacheState, Load, Totals
from scheduler_svc.service.step_record import StepTimes


def read_load(scheduler: Scheduler, recent: StepTimes | None) -> Load:
    """Return the load now, with the means of recent steps."""
    counters, pool = scheduler.counters, scheduler.pool
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
        ),
        recent=recent,
        cache=CacheState(scheduler.hit_rate, dict(counters.prefix_misses)),
    )
