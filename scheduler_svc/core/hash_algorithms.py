"""The algorithms that name blocks, by their names."""

from hashlib import sha256
from types import MappingProxyType

from xxhash import xxh3_128

from scheduler_svc.core.block_hash import HashAlgorithm
from scheduler_svc.core.cbor_hash import CborHash
from scheduler_svc.core.tagged_hash import TaggedHash

# A collision would show one user's cache to another, so the default is a hash in which nobody
# can construct one. xxh3-128 is for who trusts all that is sent.
SHA256 = TaggedHash("sha256", resists_collisions=True, function=sha256)

_ALL: tuple[HashAlgorithm, ...] = (
    SHA256,
    CborHash("sha256_cbor", resists_collisions=True, function=sha256),
    TaggedHash("xxhash", resists_collisions=False, function=xxh3_128),
    CborHash("xxhash_cbor", resists_collisions=False, function=xxh3_128),
)
HASH_ALGORITHMS = MappingProxyType({algorithm.name: algorithm for algorithm in _ALL})
