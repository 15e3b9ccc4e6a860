"""Users and names of every block: who holds it, and which prefix it can still be hit for.

users  name   meaning                                   may be handed out
> 0    set    in use, shareable                         no
> 0    none   being written                             no
0      set    idle, content kept, can be hit            after the empty ones
0      set    idle and pinned                           no
0      none   empty                                     yes
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence

from scheduler_svc.core.block_hash import BlockHash
from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.evicted_names import EvictedNames
from scheduler_svc.core.eviction import EvictionPolicyMaker, LruEviction
from scheduler_svc.core.free_block_queue import NULL_BLOCK, BlockId, FreeBlockQueue
from scheduler_svc.core.kv_events import BlockRemoved, CacheCleared, KvEventLog
from scheduler_svc.core.kv_groups import FULL_ATTENTION, KvGroup
from scheduler_svc.core.pins import Pin, PinEnd, Pins
from scheduler_svc.core.residency import Residency

_COUNTLESS = 1 << 62
"""Users of the null block: never too few to share it, never the last to release it."""


class BlockPool:
    """`num_blocks` usable blocks, ids 1 .. num_blocks; id 0 is the null block.

    All KV groups of a model take their blocks from one pool. Where a table holds nothing, the
    null block stands: it may be shared and released like others, and nothing happens.

    Two blocks may come to hold equal content, since block tables only grow at their end and
    ids that workers know never change. Each keeps its name; lookup finds the first.

    Cost: O(1) per block moved.
    """

    __slots__ = (
        "_empty",
        "_evicted",
        "_group_of",
        "_idle",
        "_index",
        "_names",
        "_now_ns",
        "_num_pinned_idle",
        "_pins",
        "_residency",
        "_twins",
        "_users",
        "events",
        "groups",
        "has_windows",
        "num_blocks",
        "num_groups",
    )

    def __init__(
        self,
        num_blocks: int,
        eviction: EvictionPolicyMaker = LruEviction,
        residency: Residency | None = None,
        pins: Pins | None = None,
        events: KvEventLog | None = None,
        groups: tuple[KvGroup, ...] = FULL_ATTENTION,
    ) -> None:
        self.num_blocks = num_blocks
        self.groups = groups
        """Of the model: each has a block table for every row."""
        self.num_groups = len(groups)
        self.has_windows = not all(group.sees_all for group in groups)
        """Rows of some group give blocks back as they go on."""
        self.events = events
        """Hears of names that come and go. None: nobody listens."""
        self._now_ns = 0
        self._residency = residency
        self._pins = Pins() if pins is None else pins
        self._num_pinned_idle = 0
        self._empty = FreeBlockQueue(num_blocks)
        self._idle = eviction(num_blocks)
        self._users = [0] * (num_blocks + 1)
        self._users[NULL_BLOCK] = _COUNTLESS
        self._group_of = bytearray(num_blocks + 1)
        self._names: list[BlockHash | None] = [None] * (num_blocks + 1)
        self._index: dict[BlockHash, BlockId] = {}
        self._twins: dict[BlockHash, list[BlockId]] = {}
        self._evicted = EvictedNames(num_blocks)

    @property
    def num_free(self) -> int:
        """Blocks that may be handed out: empty, or idle with content and not pinned."""
        return len(self._empty) + len(self._idle)

    @property
    def num_idle_cached(self) -> int:
        """Blocks without a user whose content can be hit, pinned ones too."""
        return len(self._idle) + self._num_pinned_idle

    @property
    def num_empty(self) -> int:
        """Blocks without a user and without content."""
        return len(self._empty)

    @property
    def num_used(self) -> int:
        """Blocks with a user."""
        return self.num_blocks - self.num_free - self._num_pinned_idle

    @property
    def num_pinned(self) -> int:
        """Pinned blocks, in use or idle."""
        return self._pins.num_blocks

    @property
    def num_unpinnable(self) -> int:
        """Blocks that no pin can ever take: a request that needs no more fits some day."""
        return self.num_blocks - self._pins.max_blocks

    def set_time(self, now_ns: int) -> None:
        """Say when what follows happens: once a step. Pins whose time is over end."""
        self._now_ns = now_ns
        for number in self._pins.expired(now_ns):
            self.end_pin(number, PinEnd.EXPIRED)

    def lookup(self, name: BlockHash, group: int = 0) -> BlockId | None:
        """Return a block with this name in a KV group, or None. Changes nothing."""
        return self._index.get(_key(name, group) if group else name)

    def was_evicted(self, name: BlockHash, group: int = 0) -> bool:
        """Whether a name was evicted lately: among the last `num_blocks` evictions."""
        return _key(name, group) in self._evicted

    def count_idle(self, blocks: Iterable[BlockId]) -> int:
        """Return how many of the blocks are free, so that sharing them takes free ones."""
        users, pins = self._users, self._pins
        return sum(1 for block in blocks if users[block] == 0 and block not in pins)

    def num_users(self, block: BlockId) -> int:
        """Return how many hold a block."""
        return self._users[block]

    def num_shared(self, blocks: Sequence[BlockId]) -> int:
        """Return how many leading blocks of a full table others hold too, and can be hit for.

        Cost: O(log blocks), for others share a prefix, or nothing.
        """
        users, names = self._users, self._names
        if not blocks or users[blocks[0]] < 2:
            return 0
        return bisect_left(blocks, True, key=lambda block: users[block] < 2 or names[block] is None)

    def hit(self, blocks: Sequence[BlockId]) -> None:
        """Share blocks that a prefix was found in, and take note that they were of use again."""
        self.share(blocks)
        self._idle.note_hits(blocks)
        if self._residency is not None:
            self._residency.hit(blocks, self._now_ns)

    def share(self, blocks: Sequence[BlockId]) -> None:
        """Add a user to each block. Idle ones are idle no more."""
        users, idle = self._users, self._idle
        for block in blocks:
            if users[block] == 0:
                if block in self._pins:
                    self._num_pinned_idle -= 1
                else:
                    idle.remove(block)
            users[block] += 1

    def allocate(self, count: int) -> list[BlockId]:
        """Hand out `count` blocks, each with one user, evicting idle content as needed.

        Raises: IndexError if fewer are free. Nothing is changed then.
        """
        if count > self.num_free:
            raise IndexError(f"{count} blocks wanted, {self.num_free} free")
        users, num_empty = self._users, len(self._empty)
        blocks = self._empty.pop(min(count, num_empty))
        if count > num_empty:
            evicted = self._idle.evict(count - num_empty)
            for block in evicted:
                self._evict(block)
            blocks += evicted
        for block in blocks:
            users[block] = 1
        if self._residency is not None:
            self._residency.allocated(blocks, self._now_ns)
        return blocks

    def release(self, blocks: Sequence[BlockId]) -> None:
        """Take a user from each block, given in the order in which they shall be reused.

        Empty blocks are handed out before all others, the latest first.
        """
        users, names, pins = self._users, self._names, self._pins
        empty: list[BlockId] = []
        named: list[BlockId] = []
        for block in blocks:
            users[block] -= 1
            if users[block]:
                continue
            if block in pins:
                self._num_pinned_idle += 1
            else:
                (empty if names[block] is None else named).append(block)
        self._empty.push_front(empty)
        self._idle.add(named)

    def is_shared(self, block: BlockId) -> bool:
        """Whether others hold a block too, and it can be hit."""
        return self._users[block] > 1 and self._names[block] is not None

    def publish(self, block: BlockId, name: BlockHash, group: int = 0) -> bool:
        """Give a block in use its name, so that it can be hit. False: it could be hit before.

        Rows that share a block all come to name it; the first does.
        """
        if self._names[block] is not None:
            return False
        if self.num_groups > 1:
            name = _key(name, group)
            self._group_of[block] = group
        self._names[block] = name
        self._idle.note_published(block, came_back=self._evicted.discard(name))
        if self._index.setdefault(name, block) == block:
            return True
        self._twins.setdefault(name, []).append(block)
        return False

    def retract(self, block: BlockId) -> None:
        """Take a block's name away, since its content is in doubt. No name: nothing happens."""
        if self._names[block] is None:
            return
        if block in self._pins:
            self._let_go(self._pins.cut_at(block))
        self._forget(block)
        if self._users[block] == 0:
            self._idle.remove(block)
            self._empty.push_front([block])

    def flush(self) -> int:
        """Take every name away and return how many there were. Users keep their blocks."""
        for pin in list(self._pins):
            self.end_pin(pin.number, PinEnd.FLUSHED)
        named = [BlockId(b) for b, name in enumerate(self._names) if name is not None]
        # One event stands for all names.
        events, self.events = self.events, None
        for block in named:
            self.retract(block)
        self.events = events
        if events is not None:
            events.add(CacheCleared())
        self._evicted.clear()
        if self._residency is not None:
            self._residency.clear()
        return len(named)

    def pin(self, blocks: Sequence[BlockId], expires_ns: int) -> Pin:
        """Keep named blocks, in use or idle, whatever else wants the memory.

        Raises: PinQuotaError. Nothing is changed then.
        """
        pin, fresh = self._pins.add(blocks, expires_ns)
        for block in fresh:
            if self._users[block] == 0:
                self._idle.remove(block)
                self._num_pinned_idle += 1
        return pin

    def end_pin(self, number: int, cause: PinEnd) -> bool:
        """End a pin. Blocks of it without a user become idle, the last first. False: no such."""
        freed = self._pins.end(number, cause)
        if freed is None:
            return False
        self._let_go(freed)
        return True

    def break_oldest_pin(self) -> bool:
        """End the oldest pin, since nothing goes on otherwise. False: there is none."""
        oldest = next(iter(self._pins), None)
        return oldest is not None and self.end_pin(oldest.number, PinEnd.BROKEN)

    def _let_go(self, blocks: Iterable[BlockId]) -> None:
        """Make blocks idle that no pin holds any more and that have no user."""
        idle = [block for block in blocks if self._users[block] == 0]
        self._num_pinned_idle -= len(idle)
        self._idle.add(idle)

    def _evict(self, block: BlockId) -> None:
        name = self._names[block]
        if name is None:
            raise InvariantError(f"block {block} is idle without a name")
        self._forget(block)
        if name not in self._index:
            self._evicted.add(name)

    def _forget(self, block: BlockId) -> None:
        name = self._names[block]
        if name is None:
            return
        self._names[block] = None
        twins = self._twins.get(name)
        if twins is None:
            del self._index[name]
            if self.events is not None:
                group = self._group_of[block]
                plain = BlockHash(name[:-1]) if group else name
                self.events.add(BlockRemoved(plain, group))
            return
        if self._index[name] == block:
            self._index[name] = twins.pop(0)
        else:
            twins.remove(block)
        if not twins:
            del self._twins[name]

    def check(self, tables: Iterable[Sequence[BlockId]]) -> None:
        """Prove that users, names, index and free blocks agree with the block tables.

        Raises: InvariantError. Cost: O(blocks); for tests and watchdogs.
        """
        expected = Counter(block for table in tables for block in table if block != NULL_BLOCK)
        empty, idle = list(self._empty), list(self._idle)
        free = {*empty, *idle}
        _require(len(free) == len(empty) + len(idle) == self.num_free, "a block is free twice")
        _require(NULL_BLOCK not in free, "null block handed out")
        for block in range(1, self.num_blocks + 1):
            users = self._users[block]
            _require(users == expected[BlockId(block)], f"block {block} has {users} users")
            kept = users > 0 or BlockId(block) in self._pins
            _require(kept != (block in free), f"block {block} is lost or free in use")
        _require(all(self._names[block] is None for block in empty), "an empty block has a name")
        _require(all(self._names[block] is not None for block in idle), "an idle block has no name")
        pinned = {block for pin in self._pins for block in pin.blocks}
        _require(len(pinned) == self.num_pinned, "pinned blocks miscounted")
        _require(all(self._names[block] is not None for block in pinned), "a pin has no name")
        unused = sum(1 for block in pinned if self._users[block] == 0)
        _require(unused == self._num_pinned_idle, "idle pinned blocks miscounted")
        named: dict[BlockHash, list[BlockId]] = {}
        for number, name in enumerate(self._names):
            if name is not None:
                named.setdefault(name, []).append(BlockId(number))
        _require(named.keys() == self._index.keys(), "index and names differ")
        for name, blocks in named.items():
            found = [self._index[name], *self._twins.get(name, [])]
            _require(sorted(found) == blocks, "index points to a block of another name")
        _require(not any(name in self._evicted for name in named), "a name is evicted and here")


def _key(name: BlockHash, group: int) -> BlockHash:
    """Return what a block of a group is found by: of the first group the name itself."""
    return BlockHash(name + bytes((group,))) if group else name


def _require(claim: bool, message: str) -> None:  # noqa: FBT001 - a claim is a boolean
    if not claim:
        raise InvariantError(message)
