"""From rows to tensors: the flattened tokens of one step, and where everything lies."""

from dataclasses import dataclass

import numpy as np
import torch

from worker_svc.model.operations import Embedded
from worker_svc.runtime.rows import Rows
from worker_svc.runtime.sampling_columns import NO_PROMPT_LOGPROBS
from worker_svc.runtime.step_plan import Int64Array


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """What the model needs for one step: R rows, T tokens, of which S rows sample.

    Rows are in ascending order in every column; tokens go row after row.
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
    query_start_loc = np.zeros(len(running) + 1, dtype=np.int64)
    np.cumsum(counts, out=query_start_loc[1:])

    row_of_token = np.repeat(running, counts)
    positions = np.arange(query_start_loc[-1]) + np.repeat(starts - query_start_loc[:-1], counts)
    samples = (seq_lens == rows.num_tokens[running]) & (rows.sampling.pooling[running] == 0)
    groups = rows.block_tables
    last_tokens = query_start_loc[1:][samples] - 1
    width = -(-int(seq_lens.max()) // groups[0].block_size)

    def place(column: np.ndarray[tuple[int, ...], np.dtype[np.integer]]) -> torch.Tensor:
        return torch.from_numpy(column).to(device)

    return StepInputs(
        token_ids=place(rows.tokens[row_of_token, positions].astype(np.int64)),
        positions=place(positions),
        slot_mappings=tuple(
            place(tables.slot_mapping(row_of_token, positions)) for tables in groups
        ),
        block_tables=tuple(place(tables.ids[running, :width]) for tables in groups),
        seq_lens=place(seq_lens.astype(np.int32)),
        query_start_loc=place(query_start_loc.astype(np.int32)),
        sampling_rows=running[samples],
        last_tokens=place(last_tokens),
        read_tokens=place(last_tokens) if _only_last_are_read(rows, running) else None,
        embedded=rows.embedded.of_step(running, starts, seq_lens),
    )


def _only_last_are_read(rows: Rows, running: Int64Array) -> bool:
    """Return whether no row pools, tells of its prompt, or has a draft verified."""
    params = rows.sampling
    return not (
        params.pooling[running].any()
        or (params.prompt_logprobs[running] != NO_PROMPT_LOGPROBS).any()
        or rows.num_drafted[running].any()
    )
