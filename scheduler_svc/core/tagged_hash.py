"""Our own block names: `sha256`, and `xxhash` over the same bytes.

Every field is tagged and length-prefixed, so that no adapter can pass for a salt and no two
tokens for one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from struct import iter_unpack
from typing import Protocol, cast

from scheduler_svc.core.block_hash import (
    NO_EXTRA_KEYS,
    Adapter,
    BlockHash,
    Chain,
    ExtraKeys,
    Key,
    PoolIdentity,
    Salt,
    SpanPart,
)

VERSION = 1
"""Raised when the encoding changes, so that old names of lower tiers are never hit."""


class Digestible(Protocol):
    """What a hash function of the standard library's kind returns."""

    def digest(self) -> bytes:
        """Return the hash."""


@dataclass(frozen=True, slots=True)
class TaggedHash:
    """hash[i] = H(hash[i - 1] | "T" | length | tokens of block i, little-endian | extra keys)."""

    name: str
    resists_collisions: bool

    function: Callable[[bytes], Digestible]
    """H."""

    def root(self, seed: str, pool: PoolIdentity) -> BlockHash:
        """Return the hash of seed, identity of the pool, and version."""
        parts = (
            _field(b"V", VERSION.to_bytes(4, "little")),
            _field(b"S", seed.encode()),
            _field(b"M", pool.fingerprint.encode()),
            _field(b"D", pool.kv_dtype.encode()),
            _field(b"B", pool.block_size.to_bytes(4, "little")),
            _field(b"L", pool.layout.encode()),
        )
        return BlockHash(self.function(b"pagemill" + b"".join(parts)).digest())

    def hash_full_blocks(
        self,
        tokens: memoryview,
        block_size: int,
        parent: BlockHash,
        extra: ExtraKeys = NO_EXTRA_KEYS,
        start: int = 0,
    ) -> list[BlockHash]:
        """Return the names of full blocks.

        Cost: 0.5 us a block of 16 with SHA-256, 0.2 us with xxh3-128; Python 3.11.
        """
        function, name = self.function, cast(bytes, parent)
        width = 4 * block_size
        tag = b"T" + width.to_bytes(4, "little")
        names = []
        full = tokens[: len(tokens) // block_size * block_size].tobytes()
        keys = extra.encode_by_block(start, block_size, _encode)
        for (content,), key in zip(iter_unpack(f"{width}s", full), keys, strict=False):
            name = function(name + tag + content + key).digest()
            names.append(name)
        # Not BlockHash(name) one by one: that call is a tenth of the loop.
        return cast(list[BlockHash], names)

    def hash_next_blocks(
        self, tokens: memoryview, block_size: int, chains: Sequence[Chain]
    ) -> list[BlockHash]:
        """Return the name of one more block of each chain.

        Cost: 0.8 us a block of 16 with SHA-256; Python 3.11.
        """
        function, width = self.function, 4 * block_size
        tag = b"T" + width.to_bytes(4, "little")
        names = []
        contents = iter_unpack(f"{width}s", tokens)
        for (content,), (parent, extra, start) in zip(contents, chains, strict=True):
            text = parent + tag + content
            if extra is not NO_EXTRA_KEYS:
                text += _encode(extra.of_block(start, start + block_size))
            names.append(function(text).digest())
        return cast(list[BlockHash], names)


def _encode(keys: tuple[Key, ...]) -> bytes:
    return b"".join(map(_encode_key, keys))


def _encode_key(key: Key) -> bytes:
    match key:
        case Adapter(name, generation):
            return _field(b"A", name.encode()) + _field(b"G", generation.to_bytes(8, "little"))
        case SpanPart(content_id, offset):
            place = offset.to_bytes(8, "little", signed=True)
            return _field(b"C", content_id.encode()) + _field(b"O", place)
        case Salt(domain, salt):
            # SHA-256 under every algorithm: the salt is to stay unknown to who sees a name.
            return _field(b"s", sha256(_field(b"d", domain) + _field(b"s", salt)).digest())


def _field(tag: bytes, value: bytes) -> bytes:
    return tag + len(value).to_bytes(4, "little") + value
