"""Which blocks each row holds, in numpy, kept in step with the scheduler by its plans."""

import numpy as np

from worker_svc.errors import InvariantError
from worker_svc.runtime.step_plan import Int32Array, Int64Array


class BlockTables:
    """One row of block ids per running request, for one KV group.

    Shapes: ids [max_rows, max_blocks] int32. `ids[row, i]` holds tokens
        [i * block_size, (i + 1) * block_size) of the request in `row`; 0, or a block that is
        another's by now, if no token to come sees these. Entries from `num_blocks[row]` on are
        stale, and never read.
    """

    __slots__ = ("_last_block", "_windowed", "block_size", "ids", "num_blocks")

    def __init__(
        self,
        max_rows: int,
        max_blocks: int,
        block_size: int,
        last_block: int,
        *,
        windowed: bool = False,
    ) -> None:
        """Make empty tables. Those of a windowed group may begin with null blocks."""
        self.ids: Int32Array = np.zeros((max_rows, max_blocks), dtype=np.int32)
        self.num_blocks: Int32Array = np.zeros(max_rows, dtype=np.int32)
        self.block_size = block_size
        self._last_block = last_block
        self._windowed = windowed

    def replace(self, row: int, blocks: Int32Array) -> None:
        """Give a row these blocks, and no others.

        Raises: InvariantError if there are too many, or one is not in the cache.
        """
        self._check(blocks, len(blocks), first_block=0 if self._windowed else 1)
        self.ids[row, : len(blocks)] = blocks
        self.num_blocks[row] = len(blocks)

    def append(self, rows: Int32Array, blocks: Int32Array) -> None:
        """Put `blocks[i]` behind those of `rows[i]`, in order.

        Shapes: rows, blocks [B]; a row that gains several blocks is there as often.

        Raises: InvariantError if a row would hold too many, or a block is not in the cache.
        """
        if not len(rows):
            return
        by_row = np.argsort(rows, kind="stable")
        gaining, first, counts = np.unique(rows[by_row], return_index=True, return_counts=True)
        nth = np.arange(len(rows)) - np.repeat(first, counts)
        columns = np.repeat(self.num_blocks[gaining], counts) + nth
        self._check(blocks, int(columns.max()) + 1)
        self.ids[rows[by_row], columns] = blocks[by_row]
        self.num_blocks[gaining] += counts.astype(np.int32)

    def fork(self, rows: Int64Array, parents: Int64Array, num_blocks: Int64Array) -> None:
        """Give each row the first `num_blocks` of its parent's blocks, as before the call.

        Shapes: rows, parents, num_blocks [F]; no row is there twice, none gets more blocks than
            its parent has.
        """
        width = int(num_blocks.max())
        self.ids[rows, :width] = self.ids[parents, :width]
        self.num_blocks[rows] = num_blocks

    def slot_mapping(self, rows: Int64Array, positions: Int64Array) -> Int64Array:
        """Return the cache slot of each token: block id * block_size + offset in the block.

        Shapes: rows, positions and result [T]. int64, because kernels multiply a slot by the
            bytes of a token.
        """
        columns, offsets = np.divmod(positions, self.block_size)
        return self.ids[rows, columns].astype(np.int64) * self.block_size + offsets

    def num_slots(self, rows: Int64Array) -> Int64Array:
        """Return how many tokens the blocks of each row can hold. Shapes: rows, result [R]."""
        return self.num_blocks[rows].astype(np.int64) * self.block_size

    def _check(self, blocks: Int32Array, num_blocks: int, first_block: int = 1) -> None:
        if num_blocks > self.ids.shape[1]:
            raise InvariantError(f"a row gets {num_blocks} blocks, at most {self.ids.shape[1]}")
        if len(blocks) and not (blocks.min() >= first_block and blocks.max() <= self._last_block):
            raise InvariantError(
                f"blocks {blocks.min()} to {blocks.max()} are granted, "
                f"the cache has 1 to {self._last_block}"
            )
