"""Forked rows as columns: who takes over from whom, where a plan says so in a way that can be."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from worker_svc.errors import InvariantError
from worker_svc.runtime.step_plan import ForkedRow, Int32Array, Int64Array


class ForkColumns(NamedTuple):
    """The forks of one plan. All columns are [F]."""

    rows: Int64Array
    """Each row once."""

    parents: Int64Array
    """What the rows take over from. A row may be its own parent."""

    sequence_indices: Int64Array

    num_blocks: Int64Array
    """Blocks taken over, the first of the parent's."""

    replaces_last: npt.NDArray[np.bool_]
    """Whether the last token is another than the parent's."""

    last_tokens: Int64Array
    """That token. Means nothing elsewhere."""


def fork_columns(
    forked: Sequence[ForkedRow], known: npt.NDArray[np.bool_], num_blocks: Int32Array
) -> ForkColumns:
    """Return the forks of a plan. There must be at least one.

    Shapes: known, num_blocks [max_rows]: which rows there are, and the blocks each has.

    Raises: InvariantError if a row is not in the columns or forked twice, or a parent is not
        known or has fewer blocks than are taken over.
    """
    columns = ForkColumns(
        rows=np.array([fork.row for fork in forked], dtype=np.int64),
        parents=np.array([fork.parent_row for fork in forked], dtype=np.int64),
        sequence_indices=np.array([fork.sequence_index for fork in forked], dtype=np.int64),
        num_blocks=np.array([fork.num_blocks for fork in forked], dtype=np.int64),
        replaces_last=np.array([fork.last_token is not None for fork in forked], dtype=np.bool_),
        last_tokens=np.array([fork.last_token or 0 for fork in forked], dtype=np.int64),
    )
    rows, parents = columns.rows, columns.parents
    outside = (np.minimum(rows, parents) < 0) | (np.maximum(rows, parents) >= len(known))
    if outside.any():
        place = int(np.argmax(outside))
        raise InvariantError(
            f"row {rows[place]} continues row {parents[place]}, there are 0 to {len(known) - 1}"
        )
    if len(np.unique(rows)) < len(rows):
        raise InvariantError(f"rows {rows} are forked, one of them twice")
    if not known[parents].all():
        place = int(np.argmin(known[parents]))
        raise InvariantError(
            f"row {rows[place]} continues row {parents[place]}, which is not there"
        )
    missing = (columns.num_blocks < 0) | (columns.num_blocks > num_blocks[parents])
    if missing.any():
        place = int(np.argmax(missing))
        raise InvariantError(
            f"row {rows[place]} takes over {columns.num_blocks[place]} blocks of row "
            f"{parents[place]}, which has {num_blocks[parents[place]]}"
        )
    return columns
