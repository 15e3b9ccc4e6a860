"""The prefix cache: which blocks already hold a request's prefix, and when a block gets a name.

A block is published once all its ids are known and its keys and values are planned. Until
the step that writes it has answered, the name rests on the journal.
"""

from array import array
from collections.abc import Sequence

import numpy as np

from scheduler_svc.core.block_hash import BlockHash, Chain, ExtraKeys, HashAlgorithm
from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.free_block_queue import NULL_BLOCK, BlockId
from scheduler_svc.core.group_blocks import without_unseen
from scheduler_svc.core.hit_rate import HitRateWindow
from scheduler_svc.core.journal import Journal
from scheduler_svc.core.kv_groups import longest_common_hit
from scheduler_svc.core.miss_reason import MissReason
from scheduler_svc.core.request import Request
from scheduler_svc.core.rows import Rows
from scheduler_svc.core.step_plan import IndexArray, Int32Array


class PrefixCache:
    """Names of blocks, from request to pool. Disabled, it finds, hashes and names nothing."""

    __slots__ = ("_algorithm", "_block_size", "_journal", "_root", "_rows", "enabled", "hit_rate")

    def __init__(
        self,
        block_size: int,
        rows: Rows,
        journal: Journal,
        algorithm: HashAlgorithm,
        *,
        enabled: bool,
    ) -> None:
        self.enabled = enabled
        self.hit_rate = HitRateWindow()
        self._algorithm = algorithm
        self._block_size = block_size
        self._rows = rows
        self._journal = journal
        self._root = BlockHash(b"")

    def set_root(self, root: BlockHash) -> bool:
        """Take the parent of all first blocks. True if hashes made before are void."""
        changed, self._root = root != self._root, root
        return changed

    def find(self, request: Request, pool: BlockPool) -> list[BlockId]:
        """Return the blocks that hold a waiting request's prefix, column by column.

        At least one token is left to run, since only a run gives logits.
        """
        if not self.enabled:
            return []
        self._extend_hashes(request, memoryview(request.tokens), request.num_tokens)
        if not request.read_cache:
            return []
        return self._find(request.hashes[: (request.num_tokens - 1) // self._block_size], pool)

    def find_prefix(self, tokens: "array[int]", extra: ExtraKeys, pool: BlockPool) -> list[BlockId]:
        """Return the blocks that hold leading whole blocks of some tokens, none of them null."""
        names = self._algorithm.hash_full_blocks(
            memoryview(tokens), self._block_size, self._root, extra
        )
        return [block for block in self._find(names, pool) if block != NULL_BLOCK]

    def _find(self, names: Sequence[BlockHash], pool: BlockPool) -> list[BlockId]:
        """Return columns of the longest prefix that all KV groups can go on behind."""
        groups, hits = pool.groups, []
        if len(groups) > 1 or not groups[0].sees_all:
            length = longest_common_hit(
                groups,
                lambda group, place: pool.lookup(names[place], group) is not None,
                len(names),
                self._block_size,
            )
            found = [
                pool.lookup(name, group) or NULL_BLOCK
                for name in names[:length]
                for group in range(len(groups))
            ]
            return without_unseen(found, groups, self._block_size)
        for name in names:
            block = pool.lookup(name)
            if block is None:
                break
            hits.append(block)
        return hits

    def miss_reason(self, request: Request, num_hits: int, pool: BlockPool) -> MissReason:
        """Return why `find` gave a request no more than `num_hits` blocks."""
        if not self.enabled:
            return MissReason.DISABLED
        if not request.read_cache:
            return MissReason.NOT_READ
        if num_hits == len(request.hashes):
            return MissReason.TAIL
        for name in request.hashes[num_hits:]:
            lacking = [g for g in range(pool.num_groups) if pool.lookup(name, g) is None]
            if lacking:
                evicted = any(pool.was_evicted(name, group) for group in lacking)
                return MissReason.EVICTED if evicted else MissReason.UNSEEN
        return MissReason.LAST_TOKEN

    def names(self, request: Request) -> list[BlockHash]:
        """Return the names of the full blocks a request had when it last waited, from the first.

        Empty if the cache is disabled.
        """
        if self.enabled:
            self._extend_hashes(request, memoryview(request.tokens), request.num_tokens)
        return request.hashes

    def publish_prompt(
        self, row: int, request: Request, num_hits: int, pool: BlockPool
    ) -> list[tuple[int, BlockId]]:
        """Name what a freshly admitted row fills in the step being planned, behind its hits.

        Before it is computed, so that an equal prompt of this very step hits it.

        Returns: the row and each block named, for the journal entry of that step.
        """
        rows = self._rows
        num_full = min(int(rows.num_computed[row]), request.num_tokens) // self._block_size
        rows.num_published[row] = num_full if self.enabled else num_hits
        return self._publish(row, request, num_hits, num_full, pool) if self.enabled else []

    def publish_filled(self, pool: BlockPool) -> None:
        """Name the blocks of running rows that have become full."""
        if not self.enabled:
            return
        rows, block_size = self._rows, self._block_size
        filled = np.minimum(rows.num_computed, rows.num_tokens)
        grown = (filled - rows.num_published * block_size >= block_size).nonzero()[0]
        if not len(grown):
            return
        requests, full = rows.owners_of(grown), filled[grown] // block_size
        firsts, ends = rows.num_published[grown].tolist(), full.tolist()
        rows.num_published[grown] = full
        self._hash_filled(grown, requests, full)
        published: list[tuple[int, BlockId]] = []
        one_table = pool.num_groups == 1
        for row, request, first, end in zip(grown.tolist(), requests, firsts, ends, strict=True):
            if one_table:
                blocks = request.blocks
                published += self._publish_table(row, request, blocks, first, end, pool)
            else:
                published += self._publish(row, request, first, end, pool)
        self._journal.note_published(published)

    def _hash_filled(self, grown: IndexArray, requests: list[Request], full: Int32Array) -> None:
        """Hash the full blocks of rows, mostly one more of each. Shapes: all [G]."""
        rows, block_size, root = self._rows, self._block_size, self._root
        chains: list[Chain] = []
        chained: list[list[BlockHash]] = []
        others: list[int] = []
        starts = (full - 1) * block_size
        for place, (request, start) in enumerate(zip(requests, starts.tolist(), strict=True)):
            names = request.hashes
            if len(names) * block_size == start:
                chains.append((names[-1] if names else root, request.extra, start))
                chained.append(names)
            else:
                others.append(place)
                tokens = memoryview(rows.tokens[int(grown[place])])
                self._extend_hashes(request, tokens, start + block_size)
        if others:
            grown, starts = np.delete(grown, others), np.delete(starts, others)
        tokens = rows.tokens_of(grown, starts, block_size).data
        fresh = self._algorithm.hash_next_blocks(tokens, block_size, chains)
        for names, name in zip(chained, fresh, strict=True):
            names.append(name)

    def _publish(
        self, row: int, request: Request, first: int, end: int, pool: BlockPool
    ) -> list[tuple[int, BlockId]]:
        """Name a row's columns [first, end), whose hashes are known; tell of new names."""
        num_groups = pool.num_groups
        if num_groups == 1:
            return self._publish_table(row, request, request.blocks, first, end, pool)
        published = []
        for group in range(num_groups):
            table = request.blocks[group::num_groups]
            published += self._publish_table(row, request, table, first, end, pool, group)
        return published

    def _publish_table(
        self,
        row: int,
        request: Request,
        table: list[BlockId],
        first: int,
        end: int,
        pool: BlockPool,
        group: int = 0,
    ) -> list[tuple[int, BlockId]]:
        names = request.hashes
        fresh, published = [], []
        for i in range(first, end):
            block = table[i]
            if block == NULL_BLOCK:
                continue
            published.append((row, block))
            if pool.publish(block, names[i], group):
                fresh.append(i)
        if fresh and pool.events is not None:
            adapter = request.extra.adapter
            pool.events.add_stored(
                names,
                fresh,
                memoryview(self._rows.tokens[row]),
                self._block_size,
                adapter.name if adapter else "",
                group,
            )
        return published

    def _extend_hashes(self, request: Request, tokens: memoryview, num_tokens: int) -> None:
        """Hash every full block of the first `num_tokens`, each token once."""
        block_size, known = self._block_size, len(request.hashes)
        if num_tokens // block_size > known:
            parent = request.hashes[-1] if known else self._root
            start = known * block_size
            request.hashes += self._algorithm.hash_full_blocks(
                tokens[start:num_tokens], block_size, parent, request.extra, start
            )
