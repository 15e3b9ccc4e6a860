"""What a simulated world is made of: bounds, memory and policies, drawn from random numbers."""

from dataclasses import dataclass
from random import Random

from scheduler_svc.core.block_hash import BlockHash, PoolIdentity
from scheduler_svc.core.eviction import EVICTION_POLICIES
from scheduler_svc.core.hash_algorithms import HASH_ALGORITHMS
from scheduler_svc.core.kv_events import KvEventLog
from scheduler_svc.core.kv_groups import FULL_ATTENTION, KvGroup
from scheduler_svc.core.kv_memory import KvMemory
from scheduler_svc.core.limits import Limits
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.victims import VICTIM_POLICIES
from scheduler_svc.core.waiting_queue import waiting_queue


@dataclass(frozen=True)
class Setup:
    """Everything that is decided before the first step, and may change no token."""

    limits: Limits
    groups: tuple[KvGroup, ...]
    num_blocks: int
    caching: bool
    algorithm: str
    policy: str
    ageing_ns: int
    victim: str
    eviction: str
    pinned_share: float
    has_pace: bool
    """Deadlines that cannot be met are refused."""
    is_terse: bool
    """The worker names no rows where it need not."""

    def root(self, model: str) -> BlockHash:
        """Return the parent of all first blocks, for workers of a model."""
        identity = PoolIdentity(model, "float32", self.limits.block_size, "one")
        return HASH_ALGORITHMS[self.algorithm].root(model, identity)

    def scheduler(self, memory: KvMemory) -> Scheduler:
        return Scheduler(
            self.limits,
            enable_prefix_caching=self.caching,
            hash_algorithm=HASH_ALGORITHMS[self.algorithm],
            waiting=waiting_queue(self.policy, ageing_ns=self.ageing_ns),
            choose_victim=VICTIM_POLICIES[self.victim],
            memory=memory,
        )

    def memory(self, events: KvEventLog) -> KvMemory:
        return KvMemory(
            EVICTION_POLICIES[self.eviction], events=events, max_pinned_share=self.pinned_share
        )


def draw_setup(rng: Random) -> Setup:
    threshold = rng.choice((0, 0, 1, 5))
    limits = Limits(
        block_size=rng.choice((1, 2, 3, 4, 4, 8)),
        max_num_seqs=rng.choice((1, 2, 4, 4, 8)),
        max_num_batched_tokens=rng.choice((1, 4, 8, 16, 64)),
        max_model_len=rng.choice((16, 32, 48)),
        max_waiting_requests=rng.choice((2, 8, 32)),
        # The service has 2 at most.
        pipeline_depth=rng.choice((1, 2, 2, 3)),
        watermark=rng.choice((0.0, 0.03, 0.3)),
        max_waiting_tokens=rng.choice((None, None, 60)),
        long_prefill_token_threshold=threshold,
        max_long_prefills=rng.randint(0, 2) if threshold else 0,
        max_passes=rng.choice((0, 1, 8)),
        max_pass_ns=rng.choice((0, 30, 10_000)),
    )
    groups = _draw_groups(rng)
    return Setup(
        limits,
        groups=groups,
        num_blocks=draw_num_blocks(rng, limits, len(groups)),
        caching=rng.random() < 0.8,
        algorithm=rng.choice(("sha256", "sha256", *HASH_ALGORITHMS)),
        policy=rng.choice(("fcfs", "priority", "fair")),
        ageing_ns=rng.choice((0, 1, 50)),
        victim=rng.choice(sorted(VICTIM_POLICIES)),
        eviction=rng.choice(sorted(EVICTION_POLICIES)),
        pinned_share=rng.choice((0.0, 0.0, 0.25, 0.5)),
        has_pace=rng.random() < 0.3,
        is_terse=rng.random() < 0.3,
    )


def draw_num_blocks(rng: Random, limits: Limits, num_groups: int) -> int:
    """Draw a pool: starving, tight for the rows there are, or ample."""
    whole = -(-limits.max_model_len // limits.block_size) * num_groups
    return rng.choice(
        (
            rng.randint(1, 6),
            rng.randint(whole // 2 + 1, whole + 1),
            rng.randint(whole // 2 + 1, whole + 1),
            rng.randint(whole, 2 * whole),
            whole * limits.max_num_seqs,
        )
    )


def _draw_groups(rng: Random) -> tuple[KvGroup, ...]:
    """Draw a model's KV groups: mostly one that sees all, else windows and chunks beside it."""
    if rng.random() < 0.7:
        return FULL_ATTENTION
    kinds = (KvGroup(), KvGroup(window=rng.randint(1, 9)), KvGroup(chunk=rng.randint(1, 9)))
    return tuple(rng.choices(kinds, k=rng.randint(1, 3)))
