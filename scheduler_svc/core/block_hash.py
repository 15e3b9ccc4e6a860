"""Names of full blocks: chained hashes of everything that determines their content.

Every field is tagged and length-prefixed, so that no adapter can pass for a salt and no two
tokens for one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import NewType

BlockHash = NewType("BlockHash", bytes)

VERSION = 1
"""Raised when the encoding changes, so that old names of lower tiers are never hit."""


def _field(tag: bytes, value: bytes) -> bytes:
    return tag + len(value).to_bytes(4, "little") + value


def root_hash(
    *, seed: bytes, fingerprint: str, kv_dtype: str, block_size: int, layout: str
) -> BlockHash:
    """Return the parent of every first block: what all blocks of a pool have in common.

    `seed` is configured, never random, so that two processes agree on names.
    """
    parts = (
        _field(b"V", VERSION.to_bytes(4, "little")),
        _field(b"S", seed),
        _field(b"M", fingerprint.encode()),
        _field(b"D", kv_dtype.encode()),
        _field(b"B", block_size.to_bytes(4, "little")),
        _field(b"L", layout.encode()),
    )
    return BlockHash(sha256(b"pagemill" + b"".join(parts)).digest())


@dataclass(frozen=True, slots=True)
class ExtraKeys:
    """What besides tokens separates the content, or the audience, of blocks."""

    salt: bytes = b""
    """The client's salt. Empty: none."""

    cache_domain: bytes = b""
    """Whose prefixes may be shared: the tenant's cache domain."""

    def first_block(self) -> bytes:
        """Return the encoded keys of a request's first block; later ones inherit them."""
        if not self.salt and not self.cache_domain:
            return b""
        salt = sha256(_field(b"d", self.cache_domain) + _field(b"s", self.salt)).digest()
        return _field(b"s", salt)


def hash_full_blocks(
    tokens: memoryview, block_size: int, parent: BlockHash, first_extra: bytes = b""
) -> Sequence[BlockHash]:
    """Return one chained hash for each full block of `tokens` (int32).

        hash[i] = SHA-256(hash[i - 1] | "T" | length | tokens of block i | extra keys)

    The chain makes a hash stand for its block and all before it, so comparing two hashes
    compares two prefixes. A trailing partial block has no hash: it can still change.

    SHA-256 although faster hashes exist: a collision would show one user's cache to another.
    """
    raw = tokens.cast("B")
    width = 4 * block_size
    tag = _field(b"T", b"\0" * width)[:5]
    hashes = []
    extra = first_extra
    for end in range(width, len(raw) + 1, width):
        parent = BlockHash(sha256(parent + tag + raw[end - width : end] + extra).digest())
        hashes.append(parent)
        extra = b""
    return hashes
