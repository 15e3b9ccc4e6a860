"""Verifying drafts: what a row samples behind its last token and behind each drafted one.

The draw at a position depends on the logits there and on (seed, sequence index, position) alone.
So what is kept, up to the first token that is not the drafted one, is what the row would have
sampled in as many steps, greedy or not.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from worker_svc.runtime.rows import Rows
from worker_svc.runtime.step_plan import (
    Candidates,
    Int32Array,
    Int64Array,
    StepResult,
    TokenLogprobs,
)

Draw: TypeAlias = Callable[
    [torch.Tensor, Int64Array, Int32Array], tuple[Int32Array, npt.NDArray[np.bool_]]
]
"""Samples for rows at positions, as `sampler.sample` does: the tokens, and which failed."""


class Verified(NamedTuple):
    """What rows with drafts sampled."""

    rows: Int32Array
    """[S] Ascending."""

    tokens: Int32Array
    """[T] Row after row."""

    num_tokens: Int32Array
    """[S] How many each row keeps: the drafted ones that were right, and one more."""


def verify_drafts(
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    draw: Draw,
    hidden: torch.Tensor,
    rows: Rows,
    running: Int64Array,
    reason: str,
) -> Verified | None:
    """Draw for the rows with drafts, and append to each what it keeps; None if there are none.

    A row fails, for `reason`, whose logits are no numbers up to the first token that is wrong.

    Shapes: hidden [T, E] of all tokens of the step; running [R], the rows they belong to.
    """
    if not rows.has_drafts:
        return None
    drafting = rows.num_drafted[running] > 0
    if not drafting.any():
        return None
    ends = np.cumsum(rows.num_new_tokens[running])[drafting]
    numbers = running[drafting]
    counts = rows.num_drafted[numbers] + 1
    nth = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    places = np.repeat(ends - counts, counts) + nth
    sources = np.repeat(numbers, counts)
    positions = (rows.num_tokens[sources] + nth).astype(np.int32)
    logits = logits_of(hidden[torch.from_numpy(places).to(hidden.device)])
    drawn, failed = draw(logits, sources, positions)
    kept_rows: list[int] = []
    kept: list[Int32Array] = []
    start = 0
    for row, count in zip(numbers.tolist(), counts.tolist(), strict=True):
        own = drawn[start : start + count]
        first = int(rows.num_tokens[row])
        right = own[:-1] == rows.tokens[row, first : first + count - 1]
        num_kept = 1 + int(np.argmin(right) if not right.all() else len(right))
        # What lies behind a wrong token says nothing of the row.
        if failed[start : start + num_kept].any():
            rows.failures[row] = reason
        else:
            rows.keep_verified(row, own[:num_kept])
            kept_rows.append(row)
            kept.append(own[:num_kept])
        start += count
    return Verified(
        np.array(kept_rows, dtype=np.int32),
        np.concatenate(kept) if kept else drawn[:0],
        np.array([len(tokens) for tokens in kept], dtype=np.int32),
    )


def with_verified(result: StepResult, verified: Verified) -> StepResult:
    """Return a step's result with what rows with drafts sampled, all rows in order."""
    if not len(verified.rows):
        return result
    counts = result.num_tokens if len(result.num_tokens) else np.ones_like(result.rows)
    rows = np.concatenate((result.rows, verified.rows))
    order = np.argsort(rows)
    all_counts = np.concatenate((counts, verified.num_tokens))
    parts = np.split(np.concatenate((result.tokens, verified.tokens)), np.cumsum(all_counts)[:-1])
    candidates = result.candidates
    if candidates is not None:
        none = np.zeros_like(verified.rows)
        candidates = Candidates(
            candidates.ids,
            candidates.logprobs,
            np.concatenate((candidates.counts, none))[order],
        )
    told = result.token_logprobs
    if told is not None:
        # Who drafts is not told of tokens.
        zeros = np.zeros(len(verified.tokens))
        columns = [
            np.split(
                np.concatenate((column, zeros)).astype(column.dtype), np.cumsum(all_counts)[:-1]
            )
            for column in told
        ]
        told = TokenLogprobs(
            *(np.concatenate([column[place] for place in order.tolist()]) for column in columns)
        )
    return replace(
        result,
        token_logprobs=told,
        rows=rows[order],
        tokens=np.concatenate([parts[place] for place in order.tolist()]),
        num_tokens=all_counts[order].astype(np.int32),
        candidates=candidates,
    )
