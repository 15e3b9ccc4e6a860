"""Which part of a model a rank holds: whole KV groups of heads, and columns of the rest."""

from dataclasses import dataclass, replace
from typing import Final

from worker_svc.errors import ConfigError
from worker_svc.model.model_config import ModelConfig

_WIDEST_UNIT: Final = 256
"""What column counts are rounded to where that keeps shares equal: K-quants pack so many."""

_UNIT: Final = 64
"""What they are rounded to otherwise: kernels take as many at a time."""

_FEWEST_UNITS: Final = 8
"""Units a rank, or one more on some would make the others wait for them."""

_VOCAB_UNIT: Final = 16


@dataclass(frozen=True, slots=True)
class Extent:
    """One dimension of a tensor: how long it is in the file, and what of it a rank takes."""

    whole: int
    mine: range

    @classmethod
    def full(cls, count: int) -> "Extent":
        """Return all of a dimension."""
        return cls(count, range(count))

    def times(self, size: int) -> "Extent":
        """Return the dimension in elements, where it was counted in parts of so many."""
        return Extent(self.whole * size, range(self.mine.start * size, self.mine.stop * size))

    @property
    def is_whole(self) -> bool:
        """Whether the rank takes all of it."""
        return len(self.mine) == self.whole


@dataclass(frozen=True, slots=True)
class HeadRange:
    """The heads of one rank."""

    queries: range
    keys: range
    """Key/value heads, each serving as many of the query heads."""


def split_heads(num_heads: int, num_kv_heads: int, num_ranks: int) -> tuple[HeadRange, ...]:
    """Return each rank's heads: whole KV groups, as even as these allow, the larger parts first.

    Where there are fewer KV groups than ranks, several ranks hold the same key/value head and
    share its query heads.

    Raises: ConfigError if there are more ranks than query heads.
    """
    if num_ranks > num_heads:
        raise ConfigError(
            f"tensor_parallel_size is {num_ranks}, must be at most {num_heads}, the query heads "
            "of the model"
        )
    in_group = num_heads // num_kv_heads
    if num_ranks <= num_kv_heads:
        return tuple(
            HeadRange(range(keys.start * in_group, keys.stop * in_group), keys)
            for keys in split(num_kv_heads, num_ranks)
        )
    ranges = []
    for head, sharers in enumerate(split(num_ranks, num_kv_heads)):
        first = head * in_group
        for queries in split(in_group, len(sharers)):
            mine = range(first + queries.start, first + queries.stop)
            ranges.append(HeadRange(mine, range(head, head + 1)))
    return tuple(ranges)


def split(count: int, num_parts: int) -> tuple[range, ...]:
    """Return consecutive parts of range(count) whose sizes differ by at most 1, larger first."""
    size, larger = divmod(count, num_parts)
    starts = [part * size + min(part, larger) for part in range(num_parts + 1)]
    return tuple(range(starts[part], starts[part + 1]) for part in range(num_parts))


def split_columns(count: int, num_parts: int) -> tuple[range, ...]:
    """Return consecutive parts of range(count), in units that kernels and packed weights like.

    Raises: ConfigError if there are more parts than columns.
    """
    if num_parts > count:
        raise ConfigError(
            f"tensor_parallel_size is {num_parts}, must be at most {count}, the width of an MLP"
        )
    unit = _WIDEST_UNIT
    while unit > 1 and not _fits(unit, count, num_parts):
        unit //= 2
    return tuple(
        range(part.start * unit, part.stop * unit) for part in split(count // unit, num_parts)
    )


def _fits(unit: int, count: int, num_parts: int) -> bool:
    is_even = count % (unit * num_parts) == 0
    has_many = count % unit == 0 and count >= unit * num_parts * _FEWEST_UNITS
    return is_even or (unit <= _UNIT and has_many)


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a model that one rank of a group holds."""

    rank: int = 0
    world_size: int = 1

    @property
    def is_whole(self) -> bool:
        """Whether there are no other ranks."""
        return self.world_size == 1

    @property
    def leads(self) -> bool:
        """Whether this rank samples, and adds the biases that are added once."""
        return self.rank == 0

    def heads(self, config: ModelConfig) -> HeadRange:
        """Return this rank's heads of the whole model. Raises: ConfigError as `split_heads`."""
        return split_heads(config.num_heads, config.num_kv_heads, self.world_size)[self.rank]

    def columns(self, width: int) -> Extent:
        """Return this rank's columns of an MLP. Raises: ConfigError as `split_columns`."""
        return Extent(width, split_columns(width, self.world_size)[self.rank])

    def vocab(self, vocab_size: int) -> Extent:
        """Return this rank's tokens. The last ranks may have fewer than `vocab_width`, or none."""
        width = self.vocab_width(vocab_size)
        first, last = (min(rank * width, vocab_size) for rank in (self.rank, self.rank + 1))
        return Extent(vocab_size, range(first, last))

    def vocab_width(self, vocab_size: int) -> int:
        """Return the rows of every rank's head; what gathers logits wants them equal."""
        return -(-vocab_size // (self.world_size * _VOCAB_UNIT)) * _VOCAB_UNIT

    def part_of(self, config: ModelConfig) -> ModelConfig:
        """Return the config of this rank's part, as if it were a model. The vocabulary stays whole.

        Raises: ConfigError if there are more ranks than can have a part.
        """
        if self.is_whole:
            return config
        heads = self.heads(config)
        return replace(
            config,
            num_heads=len(heads.queries),
            num_kv_heads=len(heads.keys),
            intermediate_size=len(self.columns(config.intermediate_size).mine),
        )


WHOLE: Final = Shard()
