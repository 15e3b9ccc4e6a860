"""Forking: the first tokens of a family make each of its members a request of its own."""

from array import array

from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.departure import close, end
from scheduler_svc.core.ending import note_stop_id, reason_to_end
from scheduler_svc.core.pending_fork import PendingFork
from scheduler_svc.core.request import FinishReason, Request
from scheduler_svc.core.state import SchedulerState
from scheduler_svc.core.step_draft import StepDraft
from scheduler_svc.core.step_plan import ForkedRow, Int32Array, StepOutcome


def fork_running(
    state: SchedulerState,
    root: Request,
    tokens: Int32Array,
    pool: BlockPool,
    now_ns: int,
    outcome: StepOutcome,
) -> None:
    """Give each living member its first token and, if it goes on, a row.

    They share all blocks of the root. If the root ends at once, its row passes on.
    """
    rows, row = state.rows, state.rows.row_of(root)
    num_blocks = int(rows.num_blocks[row])
    # Before others share its blocks, or they would name them again.
    state.prefixes.publish_filled(pool)
    state.families.pop(row)
    rows.num_reserved -= root.num_reserved_rows
    root.num_reserved_rows = 0
    ended, going = _deliver(state, root, tokens, now_ns, outcome)
    position = int(rows.num_tokens[row])
    rows.tokens[row, position] = tokens[0]
    rows.num_tokens[row] = position + 1
    rows.num_pending[row] -= 1
    rows.limit[row] = root.limit
    if going and going[0] is not root:
        heir = going[0]
        rows.hand_over(root, heir)
        heir.blocks, root.blocks = root.blocks, []
        rows.tokens[row, position] = token = int(tokens[heir.index])
        state.pending_forks[row] = PendingFork(row, token, num_blocks, is_new=False)
    for child in going[1:]:
        child.blocks = list(going[0].blocks)
        pool.share(child.blocks)
        taken = rows.fork(child, row)
        rows.tokens[taken, position] = token = int(tokens[child.index])
        state.pending_forks[taken] = PendingFork(row, token, num_blocks, is_new=True)
    if len(going) > 1 and root.num_prompt_tokens % state.limits.block_size:
        state.shared_tails.update(rows.row_of(member) for member in going)
    for member, reason in ended:
        if member.row is None:
            close(state, member, reason, now_ns)
        else:
            end(state, member, reason, now_ns)


def fork_waiting(
    state: SchedulerState, root: Request, tokens: Int32Array, now_ns: int, outcome: StepOutcome
) -> None:
    """Give each living member of a preempted root its first token; who goes on waits."""
    root.num_pending_tokens -= 1
    state.waiting.remove(root)
    ended, going = _deliver(state, root, tokens, now_ns, outcome)
    for member in going:
        state.waiting.add(member)
    for member, reason in ended:
        close(state, member, reason, now_ns)


def _deliver(
    state: SchedulerState, root: Request, tokens: Int32Array, now_ns: int, outcome: StepOutcome
) -> tuple[list[tuple[Request, FinishReason]], list[Request]]:
    """Append each living member's first token; return who ends with it, and who goes on."""
    prompt = root.tokens[: root.num_prompt_tokens]
    ended: list[tuple[Request, FinishReason]] = []
    going: list[Request] = []
    for member, token in zip(root.family, tokens.tolist(), strict=True):
        if member.finish_reason is not None:
            continue
        if member is not root:
            _inherit(state, member, root)
        member.awaits_fork = False
        member.admitted_tokens = root.num_prompt_tokens
        member.tokens = prompt + array("i", [token])
        member.first_token_ns = now_ns
        outcome.requests.append(member)
        outcome.tokens.append(token)
        reason = reason_to_end(member, token)
        if reason is None:
            going.append(member)
            continue
        member.last_step_id = outcome.step_id
        note_stop_id(member, token, reason)
        outcome.finished.append(member)
        ended.append((member, reason))
    state.counters.generation_tokens += len(ended) + len(going)
    return ended, going


def _inherit(state: SchedulerState, child: Request, root: Request) -> None:
    """Give a child what its root has learned since it was made."""
    child.sequence = root.sequence
    child.arrival_ns = root.arrival_ns
    child.limit = root.limit
    child.hashes = root.hashes[: root.num_prompt_tokens // state.limits.block_size]
    child.computed_before_preemption = root.computed_before_preemption
    child.tokens_when_admitted = root.num_prompt_tokens
    child.first_scheduled_ns = root.first_scheduled_ns
    child.first_step_id = root.first_step_id
    state.waiting.enter(child)


def forked_rows(state: SchedulerState, draft: StepDraft) -> tuple[ForkedRow, ...]:
    """Return what a plan says of forks, and of tables that were cut; the forks are then done."""
    forked = []
    for row in sorted(state.pending_forks.keys() | draft.cuts.keys()):
        index = state.rows.owner(row).index
        fork = state.pending_forks.get(row)
        if fork is None:
            forked.append(ForkedRow(row, row, index, None, draft.cuts[row]))
        else:
            num_blocks = draft.cuts.get(row, fork.num_blocks)
            forked.append(ForkedRow(row, fork.parent_row, index, fork.last_token, num_blocks))
    state.pending_forks.clear()
    return tuple(forked)
