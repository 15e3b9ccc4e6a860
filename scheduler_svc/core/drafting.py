"""Who drafts tokens for a step to verify, and when drafting rests because it does not pay.

A row with a draft runs its last token and the drafted ones; what the model says behind each is
sampled as ever, and kept as long as it is what was drafted. So tokens are those of a row without
drafts, greedy or drawn. How many are kept is known with the result: until then the row is serial.
"""

from typing import Final

import numpy as np

from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.continuation import grow
from scheduler_svc.core.draft_record import DraftRecord
from scheduler_svc.core.journal import FlyingStep
from scheduler_svc.core.prompt_lookup import look_up
from scheduler_svc.core.request import Request, Sampling
from scheduler_svc.core.rows import Rows
from scheduler_svc.core.state import SchedulerState
from scheduler_svc.core.step_draft import StepDraft
from scheduler_svc.core.step_plan import EMPTY, IndexArray, Int32Array

MAX_ROWS: Final = 16
"""Running rows beyond which nobody drafts: steps are bound by arithmetic then, not by memory."""

_NOBODY: IndexArray = np.zeros(0, dtype=np.intp)


def rows_to_hold(state: SchedulerState, pool: BlockPool) -> IndexArray:
    """Return rows that wait for the token in flight, since behind it they might draft.

    Only where the tokens known so far would give a draft: others go on without waiting.
    """
    rows = state.rows
    if not _is_time(state, pool):
        return _NOBODY
    waiting = (rows.num_pending == 1) & (rows.num_computed == rows.num_tokens)
    held = [row for row in np.flatnonzero(waiting).tolist() if len(_draft(state, row, 1))]
    return np.array(held, dtype=np.intp)


def add_drafts(state: SchedulerState, draft: StepDraft, pool: BlockPool) -> None:
    """Let rows that run their last token verify a draft behind it, as far as there is room."""
    rows, limits = state.rows, state.limits
    if not _is_time(state, pool):
        return
    ready = (draft.num_new == 1) & (rows.num_pending == 0)
    ready &= rows.num_computed + 1 == rows.num_tokens
    for row in np.flatnonzero(ready).tolist():
        most = min(limits.num_draft_tokens, limits.max_row_tokens - 1, draft.budget)
        # The last token of a request is sampled, and never runs.
        most = min(most, int(rows.limit[row] - rows.num_tokens[row]) - 1)
        tokens = _draft(state, row, most)
        tokens = tokens[: _make_room(rows, draft, pool, row, len(tokens), limits.block_size)]
        if len(tokens):
            draft.drafts[row] = tokens
            draft.num_new[row] += len(tokens)
            draft.take(len(tokens))


def _is_time(state: SchedulerState, pool: BlockPool) -> bool:
    # Blocks behind a window are given back as a row advances, and a draft may take it back.
    return not pool.has_windows and 0 < len(state.rows.running) <= MAX_ROWS


def _draft(state: SchedulerState, row: int, most: int) -> Int32Array:
    """Return a draft of at most so many tokens behind the known ones."""
    rows = state.rows
    request, num_tokens = rows.owner(row), int(rows.num_tokens[row])
    if most < 1 or not _is_plain(request):
        return EMPTY
    if request.drafts is None:
        request.drafts = DraftRecord()
    if num_tokens < request.drafts.rests_until:
        return EMPTY
    return look_up(rows.tokens[row, :num_tokens], most)


def _is_plain(request: Request) -> bool:
    """Whether a request's tokens depend on logits, and its own draws, alone.

    Rules that look at the output (penalties, bans), and reports on each token, are for steps of
    one token.
    """
    asked = request.sampling
    plain = Sampling(asked.temperature, asked.top_k, asked.top_p, asked.min_p, asked.seed)
    if request.reports.logprobs is not None:
        return False
    return asked == plain and not request.has_family and not request.stopping.min_output_tokens


def _make_room(
    rows: Rows, draft: StepDraft, pool: BlockPool, row: int, wanted: int, block_size: int
) -> int:
    """Return how many drafted tokens the row's blocks hold; give it blocks if there are free ones.

    Nobody is preempted for a draft.
    """
    start = int(rows.num_computed[row]) + 1
    needed = -(-(start + wanted) // block_size) - int(rows.num_blocks[row])
    if wanted and needed > 0:
        num_blocks = needed * pool.num_groups
        if num_blocks > pool.num_free:
            return max(0, int(rows.num_blocks[row]) * block_size - start)
        growing = np.array([row], dtype=np.intp)
        columns = np.array([needed], dtype=np.int32)
        grow(rows, draft, growing, columns, pool.allocate(num_blocks), pool.num_groups)
    return wanted


def expect_drafts(rows: Rows, drafts: dict[int, Int32Array]) -> None:
    """Count drafted tokens as pending, so that their rows are not planned before the result."""
    for row, tokens in drafts.items():
        rows.num_pending[row] += len(tokens)


def note_drafts(rows: Rows, drafts: dict[int, Int32Array], step: FlyingStep) -> None:
    """Keep rows with drafts apart from those that sample one token."""
    for row, tokens in drafts.items():
        step.drafts[row] = tokens
        step.samples[np.searchsorted(step.rows, row)] = False
        # Drafted tokens alone: the row has nothing left to run until it is answered.
        rows.num_pending[row] = len(tokens)
