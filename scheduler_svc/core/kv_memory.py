"""How a pool is made for each worker group that joins: what outlives one pool."""

from dataclasses import dataclass

from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.eviction import EvictionPolicyMaker, LruEviction
from scheduler_svc.core.residency import Residency


@dataclass(frozen=True, slots=True)
class KvMemory:
    """The choices behind every pool of a scheduler."""

    eviction: EvictionPolicyMaker = LruEviction
    """Which idle block dies next."""

    residency: Residency | None = None
    """Watches the lives of blocks. None: nobody does."""

    def new_pool(self, num_blocks: int) -> BlockPool:
        """Return a pool of `num_blocks` usable blocks, all empty; the one before is forgotten."""
        if self.residency is not None:
            self.residency.clear()
        return BlockPool(num_blocks, self.eviction, self.residency)
