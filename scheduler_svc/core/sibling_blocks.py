"""Blocks that a resumed member of a family can share with those of its siblings that run.

The prefix cache finds most of them by name. Where it is off, or a request does not read it,
forking would otherwise end with the first preemption.
"""

import numpy as np

from scheduler_svc.core.beam_rows import plan_lanes
from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.free_block_queue import NULL_BLOCK, BlockId
from scheduler_svc.core.group_blocks import without_unseen
from scheduler_svc.core.kv_groups import longest_common_hit
from scheduler_svc.core.request import Request
from scheduler_svc.core.state import SchedulerState
from scheduler_svc.core.step_draft import StepDraft
from scheduler_svc.core.step_plan import Int32Array


def find_blocks(
    state: SchedulerState, request: Request, draft: StepDraft, pool: BlockPool
) -> list[BlockId]:
    """Return columns of blocks that hold a waiting request's prefix: by name, or of a sibling.

    At least one token is left to run.
    """
    if request.beam is not None and not request.awaits_fork:
        lanes = plan_lanes(state, state.beams[request], pool)
        return [*{block for plan in lanes for block in plan.hits}]
    hits = state.prefixes.find(request, pool)
    if not request.has_family or request.awaits_fork:
        return hits
    known = np.frombuffer(request.tokens, dtype=np.int32)[:-1]
    for sibling in request.root.family:
        if sibling.row is not None:
            num_full = _num_common(state, sibling.row, known, draft) // state.limits.block_size
            if num_full * pool.num_groups > len(hits):
                found = _lent(sibling, num_full, pool, state.limits.block_size)
                hits = max(hits, found, key=len)
    return hits


def _lent(sibling: Request, num_full: int, pool: BlockPool, block_size: int) -> list[BlockId]:
    """Return the columns behind which a request can go on, of the first of a sibling's."""
    blocks, groups = sibling.blocks, pool.groups
    length = longest_common_hit(
        groups,
        lambda group, place: blocks[place * len(groups) + group] != NULL_BLOCK,
        num_full,
        block_size,
    )
    return without_unseen(blocks[: length * len(groups)], groups, block_size)


def note_borrowed(
    state: SchedulerState, request: Request, draft: StepDraft, hits: list[BlockId]
) -> None:
    """Let the steps in flight that may write a request's hits answer for them.

    Blocks of siblings need no name to be shared, so no other journal entry tells who writes them.
    """
    borrowed = {block for block in hits if block != NULL_BLOCK}
    for sibling in request.root.family:
        if sibling.row is None or sibling is request or borrowed.isdisjoint(sibling.blocks):
            continue
        row, generation = sibling.row, int(state.rows.generation[sibling.row])
        lent = [(row, block) for block in sibling.blocks if block in borrowed]
        for step in state.journal:
            if step.ran_for(row, generation):
                step.published += lent
        draft.published += lent


def _num_common(state: SchedulerState, row: int, known: Int32Array, draft: StepDraft) -> int:
    """Return how many leading tokens a row shares, and has computed or computes in this step."""
    rows = state.rows
    planned = int(rows.num_computed[row]) + int(draft.num_new[row])
    length = min(len(known), planned, int(rows.num_tokens[row]))
    differ = np.flatnonzero(rows.tokens[row, :length] != known[:length])
    return int(differ[0]) if len(differ) else length
