"""How a pool is made for each worker group that joins: what outlives one pool."""

from dataclasses import dataclass

from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.eviction import EvictionPolicyMaker, LruEviction


@dataclass(frozen=True, slots=True)
class KvMemory:
    """The choices behind every pool of a scheduler."""

    eviction: EvictionPolicyMaker = LruEviction
    """Which idle block dies next."""

    def new_pool(self, num_blocks: int) -> BlockPool:
        """Return a pool of `num_blocks` usable blocks, all empty."""
        return BlockPool(num_blocks, self.eviction)
