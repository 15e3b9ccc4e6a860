"""vLLM's block names, for routers and caches that hold names of both: `sha256_cbor`, `xxhash_cbor`.

Byte-equal to vLLM's, given the same seed, for requests without an adapter or a cache domain.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import numpy as np

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
from scheduler_svc.core.tagged_hash import Digestible

UNSET_SEED = "vllm-none-hash"
"""What vLLM takes for SHA-256 when PYTHONHASHSEED is unset."""

UNSIGNED, NEGATIVE, BYTES, TEXT, ARRAY = range(5)
NULL = b"\xf6"

FEW_BLOCKS = 4
"""Where numpy begins to pay: it takes 18 us for any number, a block without it 5 us."""


@dataclass(frozen=True, slots=True)
class CborHash:
    """hash[i] = H(cbor([hash[i - 1], tokens of block i, extra keys or null])), canonical CBOR.

    The root is H(cbor(seed)) and knows no model: who compares names compares models first.
    """

    name: str
    resists_collisions: bool

    function: Callable[[bytes], Digestible]
    """H."""

    def root(self, seed: str, pool: PoolIdentity) -> BlockHash:
        """Return vLLM's NONE_HASH under PYTHONHASHSEED=seed; empty: unset."""
        return BlockHash(self.function(_text(seed or UNSET_SEED)).digest())

    def hash_full_blocks(
        self,
        tokens: memoryview,
        block_size: int,
        parent: BlockHash,
        extra: ExtraKeys = NO_EXTRA_KEYS,
        start: int = 0,
    ) -> list[BlockHash]:
        """Return the names of full blocks.

        Cost: 1.2 us a block of 16 with SHA-256, 0.9 us with xxh3-128; Python 3.11.
        """
        function, name = self.function, cast(bytes, parent)
        before = b"\x83" + _head(BYTES, len(name))
        array = _head(ARRAY, block_size)
        names = []
        keys = extra.encode_by_block(start, block_size, _encode)
        for content, key in zip(_blocks(tokens, block_size), keys, strict=False):
            name = function(before + name + array + content + key).digest()
            names.append(name)
        # Not BlockHash(name) one by one: that call is a tenth of the loop.
        return cast(list[BlockHash], names)

    def hash_next_blocks(
        self, tokens: memoryview, block_size: int, chains: Sequence[Chain]
    ) -> list[BlockHash]:
        """Return the name of one more block of each chain."""
        function, array = self.function, _head(ARRAY, block_size)
        names = []
        for content, chain in zip(_blocks(tokens, block_size), chains, strict=True):
            parent, extra, start = chain
            before = b"\x83" + _head(BYTES, len(parent)) + parent + array
            keys = _encode(extra.of_block(start, start + block_size))
            names.append(function(before + content + keys).digest())
        return cast(list[BlockHash], names)


def _blocks(tokens: memoryview, block_size: int) -> list[bytes]:
    """Return the token ids of each full block, encoded one behind the other."""
    num_blocks = len(tokens) // block_size
    if num_blocks < FEW_BLOCKS:
        heads = [_head(UNSIGNED, token) for token in tokens.tolist()]
        ends = range(block_size, len(heads) + 1, block_size)
        return [b"".join(heads[end - block_size : end]) for end in ends]
    return _many_blocks(tokens, num_blocks, block_size)


def _many_blocks(tokens: memoryview, num_blocks: int, block_size: int) -> list[bytes]:
    ids = np.frombuffer(tokens, dtype="<i4")[: num_blocks * block_size]
    # An id is a head byte and 0, 1, 2 or 4 bytes, flush right in a cell of 5. Below 24 the head
    # is the id, which is the last byte of the big-endian number anyway.
    cells = np.zeros((len(ids), 5), dtype=np.uint8)
    cells[:, 1:] = ids.astype(">u4").view(np.uint8).reshape(-1, 4)
    width = 1 + (ids > 23) + (ids > 0xFF) + 2 * (ids > 0xFFFF)
    for head, num_bytes in ((0x18, 2), (0x19, 3), (0x1A, 5)):
        cells[width == num_bytes, 5 - num_bytes] = head
    flat = cells[np.arange(5) >= 5 - width[:, None]].tobytes()
    ends = width.reshape(num_blocks, block_size).sum(axis=1).cumsum().tolist()
    return [flat[begin:end] for begin, end in pairwise([0, *ends])]


def _encode(keys: tuple[Key, ...]) -> bytes:
    return _head(ARRAY, len(keys)) + b"".join(map(_encode_key, keys)) if keys else NULL


def _encode_key(key: Key) -> bytes:
    """Return a key in vLLM's form; where there is none that says enough, in one of ours."""
    match key:
        case Adapter(name, generation):
            # vLLM's names it by its path, whatever lies there.
            return _text(f"lora:{name}@{generation}")
        case SpanPart(content_id, offset):
            return _array(_text("mm"), _text(content_id), _integer(offset))
        case Salt(b"", salt):
            return _array(_text("cache_salt"), _head(TEXT, len(salt)) + salt)
        case Salt(domain, salt):
            return _array(_text("cache_domain"), _bytes(domain), _bytes(salt))


def _head(kind: int, number: int) -> bytes:
    """Return the shortest encoding of a number, or of the length of what follows it."""
    if number < 24:
        return bytes([kind << 5 | number])
    size = 1 << (number > 0xFF) + (number > 0xFFFF) + (number > 0xFFFFFFFF)
    return bytes([kind << 5 | 23 + size.bit_length()]) + number.to_bytes(size, "big")


def _integer(number: int) -> bytes:
    return _head(UNSIGNED, number) if number >= 0 else _head(NEGATIVE, -1 - number)


def _bytes(value: bytes) -> bytes:
    return _head(BYTES, len(value)) + value


def _text(value: str) -> bytes:
    encoded = value.encode()
    return _head(TEXT, len(encoded)) + encoded


def _array(*items: bytes) -> bytes:
    return _head(ARRAY, len(items)) + b"".join(items)
