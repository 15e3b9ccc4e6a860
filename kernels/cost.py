"""How many bytes each kernel touches in device memory: the smallest number, plus what is stated.

A test counts the interpreter's loads and stores and finds these numbers exactly.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from kernels.tuned import MatmulTile


@dataclass(frozen=True, slots=True)
class Heads:
    """The shape of a layer's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    itemsize: int
    """Bytes of an activation."""

    kv_itemsize: int
    """Bytes of a cached element."""

    @property
    def kv_bytes(self) -> int:
        """Of one token's key and value."""
        return 2 * self.num_kv_heads * self.head_dim * self.kv_itemsize

    @property
    def q_bytes(self) -> int:
        """Of one token's queries, or of its output."""
        return self.num_heads * self.head_dim * self.itemsize


def store_bytes(num_tokens: int, heads: Heads) -> int:
    """Return what `store_kv` touches: each key and value read once and written once."""
    read = 2 * heads.num_kv_heads * heads.head_dim * heads.itemsize
    return num_tokens * (read + heads.kv_bytes)


def in_sight(length: int, num_new: int, window: int | None) -> int:
    """Return how many tokens the last `num_new` of a sequence see together."""
    return length if window is None else min(length, window + num_new - 1)


def decode_kv_bytes(seq_lens: Iterable[int], heads: Heads, window: int | None = None) -> int:
    """Return the keys and values that `paged_decode` reads: each once, whatever the splits."""
    return sum(in_sight(length, 1, window) for length in seq_lens) * heads.kv_bytes


def split_bytes(num_tokens: int, num_splits: int, heads: Heads) -> int:
    """Return what splits add at most: partial results and their sums, written and read once."""
    if num_splits == 1:
        return 0
    return 2 * num_tokens * num_splits * heads.num_heads * (heads.head_dim + 1) * 4


def prefill_kv_bytes(
    requests: Iterable[tuple[int, int]], heads: Heads, rows: int, window: int | None = None
) -> int:
    """Return the keys and values that `paged_prefill` reads, of requests (seq_len, new tokens).

    Each tile of `rows` query rows reads what its tokens see, once for all heads that share it.
    """
    tokens_per_tile = rows // (heads.num_heads // heads.num_kv_heads)
    read = 0
    for length, num_new in requests:
        for first in range(0, num_new, tokens_per_tile):
            tokens = min(tokens_per_tile, num_new - first)
            read += in_sight(length - num_new + first + tokens, tokens, window)
    return read * heads.kv_bytes


def cascade_kv_bytes(
    num_requests: int, prefix: int, own_tokens: int, heads: Heads, rows: int
) -> int:
    """Return the keys and values that `shared_prefix` reads.

    The prefix is read once per tile of query rows; `own_tokens` is the sum over all requests.
    """
    group = heads.num_heads // heads.num_kv_heads
    tiles = -(-num_requests * group // rows)
    return (tiles * prefix + own_tokens) * heads.kv_bytes


def quantised_matmul_bytes(
    num_tokens: int, num_outputs: int, num_inputs: int, itemsize: int, weight_bytes: int,
    tile: MatmulTile,
) -> int:  # fmt: skip
    """Return what `quantised_matmul` touches.

    Each tile of tokens reads the weight, each tile of outputs reads x; parts of a sum are written
    and read once. Where all inputs share a scale, each split reads it: that is left out.
    """
    weight = -(-num_tokens // tile.rows) * weight_bytes
    x = -(-num_outputs // tile.columns) * num_tokens * num_inputs * itemsize
    parts = 0 if tile.splits == 1 else 2 * tile.splits * num_tokens * num_outputs * 4
    return weight + x + parts + num_tokens * num_outputs * itemsize
