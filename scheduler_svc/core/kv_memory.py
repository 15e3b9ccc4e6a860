"""How a pool is made for each worker group that joins, and what outlives it."""

from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.eviction import EvictionPolicyMaker, LruEviction
from scheduler_svc.core.kv_events import CacheCleared, KvEventLog
from scheduler_svc.core.kv_groups import FULL_ATTENTION, KvGroup
from scheduler_svc.core.pins import Pins
from scheduler_svc.core.residency import Residency


class KvMemory:
    """The choices behind every pool of a scheduler, and those who hear of it."""

    __slots__ = ("_eviction", "_max_pinned_share", "events", "pins", "residency")

    def __init__(
        self,
        eviction: EvictionPolicyMaker = LruEviction,
        *,
        residency: Residency | None = None,
        events: KvEventLog | None = None,
        max_pinned_share: float = 0.0,
    ) -> None:
        """Make pools with this policy, of which at most a share of the blocks may be pinned.

        Without `residency` nobody watches the lives of blocks, without `events` the names.
        """
        self._eviction = eviction
        self._max_pinned_share = max_pinned_share
        self.residency = residency
        self.events = events
        self.pins = Pins()

    def new_pool(self, num_blocks: int, groups: tuple[KvGroup, ...] = FULL_ATTENTION) -> BlockPool:
        """Return a pool of `num_blocks` usable blocks, all empty; the one before is forgotten."""
        self.pins.start_pool(int(self._max_pinned_share * num_blocks))
        if self.residency is not None:
            self.residency.clear()
        if self.events is not None:
            self.events.add(CacheCleared())
        return BlockPool(num_blocks, self._eviction, self.residency, self.pins, self.events, groups)
