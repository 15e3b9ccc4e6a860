"""From rows to tensors: the flattened tokens of one step, and where everything lies."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from worker_svc.model.operations import Embedded
from worker_svc.runtime.rows import Rows
from worker_svc.runtime.step_plan import Int64Array


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """What the model needs for one step: R rows, T tokens, of which S rows sample.

    Rows are in ascending order in every column; tokens go row after row. A row that verifies a
    draft is there once for each of its tokens: as attention takes them one by one without a draft,
    so it does with one, and gives the same bits.
    """

    token_ids: torch.Tensor
    """[T] int64."""

    positions: torch.Tensor
    """[T] int64. Place of each token in its sequence, from 0."""

    slot_mappings: tuple[torch.Tensor, ...]
    """Per KV group, [T] int64. Where each token's keys and values go."""

    block_tables: tuple[torch.Tensor, ...]
    """Per KV group, [R, B] int32. B is what the longest row needs; stale behind a row's own
    blocks, and before a window."""

    seq_lens: torch.Tensor
    """[R] int32. Tokens each row attends to, its new ones included."""

    query_start_loc: torch.Tensor
    """[R + 1] int32. Where each row's tokens start. The last entry is T."""

    sampling_rows: Int64Array
    """[S] Rows whose known tokens all are in the cache after this step."""

    last_tokens: torch.Tensor
    """[S] int64. Places in the step of the tokens whose logits are sampled from."""

    read_tokens: torch.Tensor | None
    """[P] int64, ascending. Places in the step of the tokens whose hidden states are read. None:
    all may be."""

    embedded: Embedded | None = None
    """Tokens that have vectors in place of their ids. None: no token has."""


def build_step_inputs(rows: Rows, running: Int64Array, device: torch.device) -> StepInputs:
    """Return the tensors for running these rows. There must be at least one.

    Shapes: running [R], ascending.
    """
    starts = rows.num_computed_tokens[running].astype(np.int64)
    counts = rows.num_new_tokens[running].astype(np.int64)
    seq_lens = starts + counts
    ends = np.cumsum(counts)
    row_of_token = np.repeat(running, counts)
    positions = np.arange(ends[-1]) + np.repeat(seq_lens - ends, counts)
    if rows.has_drafts:
        apart = rows.num_drafted[running] > 0
        attending, attended, new = _token_by_token(running, seq_lens, counts, apart)
    else:
        attending, attended, new = running, seq_lens, counts
    query_start_loc = np.concatenate(([0], np.cumsum(new)))
    samples = (seq_lens == rows.num_tokens[running]) & (rows.sampling.pooling[running] == 0)
    groups = rows.block_tables
    last_tokens = ends[samples] - 1
    width = -(-int(seq_lens.max()) // groups[0].block_size)

    def place(column: np.ndarray[tuple[int, ...], np.dtype[np.integer]]) -> torch.Tensor:
        return torch.from_numpy(column).to(device)

    return StepInputs(
        token_ids=place(rows.tokens[row_of_token, positions].astype(np.int64)),
        positions=place(positions),
        slot_mappings=tuple(
            place(tables.slot_mapping(row_of_token, positions)) for tables in groups
        ),
        block_tables=tuple(place(tables.ids[attending, :width]) for tables in groups),
        seq_lens=place(attended.astype(np.int32)),
        query_start_loc=place(query_start_loc.astype(np.int32)),
        sampling_rows=running[samples],
        last_tokens=place(last_tokens),
        read_tokens=None if rows.read_all_tokens(running) else place(last_tokens),
        embedded=rows.embedded.of_step(running, starts, seq_lens),
    )


def _token_by_token(
    running: Int64Array, seq_lens: Int64Array, counts: Int64Array, apart: npt.NDArray[np.bool_]
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return rows, lengths and new tokens, with each token of some rows as one of its own.

    Shapes: all [R]; returns [A] each, A = R where no row is `apart`.
    """
    times = np.where(apart, counts, 1)
    left = np.cumsum(times).repeat(times) - np.arange(times.sum()) - 1
    new = np.where(apart, 1, counts).repeat(times)
    return running.repeat(times), seq_lens.repeat(times) - left, new
