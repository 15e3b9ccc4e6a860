"""Names of full blocks: what goes into them, and what an algorithm that makes them can do.

A name is a chained hash of everything that determines a block's content or its audience: the
tokens of the block and of all before it, and extra keys.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice, pairwise, repeat
from typing import NewType, Protocol

BlockHash = NewType("BlockHash", bytes)


@dataclass(frozen=True, slots=True)
class PoolIdentity:
    """What all blocks of a pool have in common."""

    fingerprint: str
    """Of the model."""

    kv_dtype: str
    block_size: int

    layout: str
    """How the bytes of a block are arranged."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """What changes the keys and values of every block of a request."""

    name: str

    generation: int
    """Of the content under this name: raised when it is loaded anew. 64 bits."""


@dataclass(frozen=True, slots=True)
class ContentSpan:
    """Positions that are filled from something else than their token ids: an image, embeddings."""

    content_id: str
    """Says what fills them; equal content has equal ids."""

    start: int
    """Its first position in the request."""

    length: int
    """Positions. At least 1."""

    @property
    def end(self) -> int:
        """The position behind it."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class SpanPart:
    """A content span as one block sees it."""

    content_id: str

    offset: int
    """Of the span's start from the block's. Negative if it began in an earlier block."""


@dataclass(frozen=True, slots=True)
class Salt:
    """Who may share a request's prefixes."""

    cache_domain: bytes
    salt: bytes


Key = Adapter | SpanPart | Salt


@dataclass(frozen=True, slots=True)
class ExtraKeys:
    """What besides tokens separates the content, or the audience, of blocks."""

    salt: bytes = b""
    """The client's salt. Empty: none."""

    cache_domain: bytes = b""
    """Whose prefixes may be shared: the tenant's cache domain."""

    adapter: Adapter | None = None
    """None: the model as it is."""

    spans: tuple[ContentSpan, ...] = ()
    """In order of position, none over another."""

    def __post_init__(self) -> None:
        if any(span.length < 1 for span in self.spans):
            raise ValueError("a content span is empty")
        if any(later.start < span.end for span, later in pairwise(self.spans)):
            raise ValueError("content spans are out of order, or one lies over another")

    def of_block(self, start: int, end: int) -> tuple[Key, ...]:
        """Return the keys of the block of positions [start, end): adapter, spans, salt.

        The salt enters a request's first block alone: the chain hands it on.
        """
        if start and not self.spans:
            return (self.adapter,) if self.adapter else ()
        keys: list[Key] = [self.adapter] if self.adapter else []
        if self.spans:
            first = bisect_right(self.spans, start, key=lambda span: span.end)
            for span in islice(self.spans, first, None):
                if span.start >= end:
                    break
                keys.append(SpanPart(span.content_id, span.start - start))
        if start == 0 and (self.salt or self.cache_domain):
            keys.append(Salt(self.cache_domain, self.salt))
        return tuple(keys)

    def encode_by_block(
        self, start: int, block_size: int, encode: Callable[[tuple[Key, ...]], bytes]
    ) -> Iterable[bytes]:
        """Return the encoded keys of the block at position `start` and, without end, of the next.

        Cost: one `encode` or two for all blocks, if there are no spans.
        """
        if self.spans:
            begins = count(start, block_size)
            return (encode(self.of_block(begin, begin + block_size)) for begin in begins)
        first = encode(self.of_block(start, start + block_size))
        if start:
            return repeat(first)
        return chain((first,), repeat(encode(self.of_block(block_size, 2 * block_size))))


NO_EXTRA_KEYS = ExtraKeys()

Chain = tuple[BlockHash, ExtraKeys, int]
"""The name of a request's latest named block, its extra keys, and where its next block starts."""


class HashAlgorithm(Protocol):
    """A way to name blocks. It keeps nothing, so that one object serves everyone."""

    @property
    def name(self) -> str:
        """As `--prefix-caching-hash-algo` has it."""

    @property
    def resists_collisions(self) -> bool:
        """Nobody can construct two prompts with one name."""

    def root(self, seed: str, pool: PoolIdentity) -> BlockHash:
        """Return the parent of every first block.

        `seed` is configured, never random, so that two processes agree on names.
        """

    def hash_full_blocks(
        self,
        tokens: memoryview,
        block_size: int,
        parent: BlockHash,
        extra: ExtraKeys = NO_EXTRA_KEYS,
        start: int = 0,
    ) -> list[BlockHash]:
        """Return one chained hash for each full block of `tokens` (int32).

        `start` is the request's position of the first token, at the beginning of a block, and
        `parent` the name of the block before it, or the root.

        The chain makes a hash stand for its block and all before it, so comparing two hashes
        compares two prefixes. A trailing partial block has no hash: it can still change.
        """

    def hash_next_blocks(
        self, tokens: memoryview, block_size: int, chains: Sequence[Chain]
    ) -> list[BlockHash]:
        """Return the hash of one more block of each chain, as `hash_full_blocks` would.

        `tokens` (int32) holds these blocks one behind the other.
        """
