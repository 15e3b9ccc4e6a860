"""Beams as rows: they are preempted together, and come back together or not at all.

A family that resumes gets all its blocks at once, full ones that several lanes have in common
once, so that two families can never wait for each other half way. A lane whose shared blocks
another lane still fills has a row, and waits there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scheduler_svc.core.beam_family import BeamFamily
from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.free_block_queue import BlockId
from scheduler_svc.core.group_blocks import without_unseen
from scheduler_svc.core.request import Request
from scheduler_svc.core.state import SchedulerState
from scheduler_svc.core.step_draft import StepDraft


@dataclass(frozen=True, slots=True)
class LanePlan:
    """What a lane finds when it comes back."""

    lane: Request

    hits: list[BlockId]
    """Columns of blocks found by name. Empty if another lane has more."""

    source: Request | None
    """The lane whose first blocks it shares instead."""

    num_shared: int
    """Columns of hits, or of the source."""


def preemptible(state: SchedulerState, running: Sequence[Request]) -> Sequence[Request]:
    """Return those who may be victims: of beams the root, which stands for all."""
    if not state.beams:
        return running
    return [each for each in running if each.root is each or each.root.beam is None]


def lanes_of(state: SchedulerState, request: Request) -> list[Request]:
    """Return all who leave with a request that runs: its beams, or itself."""
    family = state.beams.get(request)
    return family.lanes if family else [request]


def freed_blocks(state: SchedulerState, request: Request, pool: BlockPool) -> set[BlockId]:
    """Return the blocks that nobody holds once a running request has left."""
    family = state.beams.get(request)
    uses = family.block_uses() if family else dict.fromkeys(request.blocks, 1)
    return {block for block, count in uses.items() if pool.num_users(block) == count}


def plan_lanes(state: SchedulerState, family: BeamFamily, pool: BlockPool) -> list[LanePlan]:
    """Return where each lane of a family that waits finds its prefix. Nothing is changed.

    Cost: O(lanes squared) comparisons of their tokens.
    """
    block_size, num_groups = state.limits.block_size, pool.num_groups
    see_all = all(group.sees_all for group in pool.groups)
    tokens = [np.frombuffer(lane.tokens, dtype=np.int32)[:-1] for lane in family.lanes]
    plans: list[LanePlan] = []
    for lane, known in zip(family.lanes, tokens, strict=True):
        best = LanePlan(
            lane, hits := state.prefixes.find(lane, pool), None, len(hits) // num_groups
        )
        for before, other in zip(plans, tokens, strict=False):
            differ = np.flatnonzero(known != other)
            num_full = int(differ[0] if len(differ) else len(known)) // block_size
            # What lies before the window of a hit is not there to be shared.
            is_there = see_all or num_full >= before.num_shared
            if num_full > best.num_shared and is_there:
                best = LanePlan(lane, [], before.lane, num_full)
        plans.append(best)
    return plans


def num_lane_blocks(state: SchedulerState, plans: list[LanePlan], pool: BlockPool) -> int:
    """Return how many free blocks the lanes take."""
    hits = {block for plan in plans for block in plan.hits}
    whole = -(-plans[0].lane.num_tokens // state.limits.block_size)
    num_columns = sum(whole - plan.num_shared for plan in plans)
    return num_columns * pool.num_groups + pool.count_idle(hits)


def admit_lanes(
    state: SchedulerState, plans: list[LanePlan], draft: StepDraft, pool: BlockPool
) -> None:
    """Give every lane a row and all its blocks; those whose prefix is there run."""
    family = state.beams[plans[0].lane.root]
    family.root.tokens_when_admitted = family.root.num_tokens
    for plan in plans:
        pool.hit(plan.hits)
    for plan in plans:
        _admit_lane(state, family, plan, draft, pool)


def _admit_lane(
    state: SchedulerState, family: BeamFamily, plan: LanePlan, draft: StepDraft, pool: BlockPool
) -> None:
    rows, block_size = state.rows, state.limits.block_size
    lane, root, source = plan.lane, family.root, plan.source
    shared = plan.hits
    if source is not None:
        shared = source.blocks[: plan.num_shared * pool.num_groups]
        shared = without_unseen(shared, pool.groups, block_size)
        pool.share(shared)
    num_columns = -(-lane.num_tokens // block_size)
    granted = pool.allocate((num_columns - plan.num_shared) * pool.num_groups)
    lane.blocks = [*shared, *granted]
    lane.admitted_tokens = num_hit = plan.num_shared * block_size
    lane.precedence = (*root.precedence[:2], lane.index)
    is_ready = source is None or int(rows.num_computed[rows.row_of(source)]) >= num_hit
    gap = lane.num_tokens - num_hit
    count = min(gap, draft.budget, state.limits.max_row_tokens) if is_ready else 0
    row = rows.take(lane, num_hit + count, num_columns)
    rows.account[row] = root.account or 0
    rows.limit[row] = lane.num_tokens + is_ready
    state.families[row] = lane
    if source is not None and not is_ready:
        family.blocked[lane] = (source, num_hit)
    draft.published += state.prefixes.publish_prompt(row, lane, plan.num_shared, pool)
    draft.add(lane, count)
    draft.num_long_prefills += gap > state.limits.max_row_tokens
    state.waiting.charge(root, count)
    again = max(0, lane.computed_before_preemption - num_hit)
    root.num_recomputed_tokens += again
    state.counters.recomputed_tokens += again


def wake_lanes(state: SchedulerState) -> None:
    """Let lanes run whose shared blocks have been planned by the lane that fills them."""
    rows = state.rows
    for family in state.beams.values():
        for lane, (source, num_tokens) in list(family.blocked.items()):
            if rows.num_computed[rows.row_of(source)] >= num_tokens:
                rows.limit[rows.row_of(lane)] = rows.num_tokens[rows.row_of(lane)] + 1
                del family.blocked[lane]
