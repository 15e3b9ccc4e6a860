"""Somebody who has only the events, and rebuilds the index of the prefix cache from them."""

from array import array
from collections.abc import Iterable

import numpy as np

from pagemill.v1 import control_pb2
from scheduler_svc.core.block_hash import BlockHash, ExtraKeys, HashAlgorithm
from scheduler_svc.core.kv_events import BlockRemoved, BlocksStored, CacheCleared, KvEvent


class KvReplica:
    """The names that can be hit, each with the tokens of its block.

    It proves of each event that the names are new, or there, and follow from their tokens.
    """

    def __init__(
        self,
        algorithm: HashAlgorithm,
        root: BlockHash,
        salts: Iterable[bytes] = (b"",),
        extras: Iterable[ExtraKeys] = (),
    ) -> None:
        self.names: dict[BlockHash, tuple[int, ...]] = {}
        self._algorithm = algorithm
        self._root = root
        self._extras = [*map(ExtraKeys, salts), *extras]

    def apply(self, events: Iterable[KvEvent]) -> None:
        for event in events:
            match event:
                case BlocksStored():
                    self._store(event)
                case BlockRemoved(name=name):
                    del self.names[name]
                case CacheCleared():
                    self.names.clear()

    def apply_message(self, message: control_pb2.SubscribeKvEventsResponse) -> None:
        self.apply(map(event_of, message.events))

    def _store(self, event: BlocksStored) -> None:
        assert len(event.token_ids) == 4 * event.block_size * len(event.names)
        for extra in self._extras:
            names = self._algorithm.hash_full_blocks(
                memoryview(array("i", event.token_ids)),
                event.block_size,
                event.parent or self._root,
                extra,
                start=event.block_size if event.parent else 0,
            )
            if tuple(names) == event.names:
                break
        else:
            raise AssertionError("names do not follow from parent and tokens")
        tokens = np.frombuffer(event.token_ids, dtype=np.int32).reshape(-1, event.block_size)
        for name, block in zip(event.names, tokens.tolist(), strict=True):
            assert name not in self.names
            self.names[name] = tuple(block)


def event_of(message: control_pb2.KvEvent) -> KvEvent:
    """Return what a message says."""
    assert (message.medium, message.replica) == ("device", 0)
    match message.WhichOneof("event"):
        case "stored":
            stored = message.stored
            return BlocksStored(
                tuple(map(BlockHash, stored.block_hashes)),
                BlockHash(stored.parent_hash),
                stored.token_ids,
                stored.block_size,
                stored.adapter,
                message.group,
            )
        case "removed":
            (name,) = message.removed.block_hashes
            return BlockRemoved(BlockHash(name), message.group)
        case _:
            assert message.cleared
            return CacheCleared()
