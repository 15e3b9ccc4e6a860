"""What always holds between queue, rows, families and blocks."""

from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.free_block_queue import NULL_BLOCK
from scheduler_svc.core.request import Request
from scheduler_svc.core.state import SchedulerState


def check_state(state: SchedulerState) -> None:
    """Prove the invariants. Raises: InvariantError. Cost: O(blocks); for tests."""
    alive = [each for root in state.live.values() for each in _queued_or_running(root)]
    if state.pool is not None:
        state.pool.check([request.blocks for request in alive])
    state.rows.check()
    running = state.rows.running
    if sorted(r.precedence for r in running) != [r.precedence for r in running]:
        raise InvariantError("running requests are not in order of precedence")
    if state.waiting.num_tokens != sum(r.num_tokens for r in state.waiting):
        raise InvariantError("waiting tokens miscounted")
    if {*map(id, running), *map(id, state.waiting)} != set(map(id, alive)):
        raise InvariantError("a live request neither runs nor waits")
    _check_tables(state)
    _check_families(state)


def _check_tables(state: SchedulerState) -> None:
    """Prove that all tables of a row are equally long, and that each token to come sees its own."""
    if (pool := state.pool) is None:
        return
    rows, size, num_groups = state.rows, state.limits.block_size, pool.num_groups
    for request in rows.running:
        row = rows.row_of(request)
        if len(request.blocks) != int(rows.num_blocks[row]) * num_groups:
            raise InvariantError(f"row {row} has block tables of different lengths")
        for number, group in enumerate(pool.groups):
            seen = group.num_unseen_blocks(int(rows.num_computed[row]), size)
            if NULL_BLOCK in request.blocks[seen * num_groups + number :: num_groups]:
                raise InvariantError(f"row {row} lacks a block that it sees")


def _queued_or_running(root: Request) -> list[Request]:
    """Return the members who must be in the queue or in a row."""
    if root.beam is not None:
        return [each for each in root.family if each is root or each.row is not None]
    return [
        each
        for each in root.family
        if each.finish_reason is None and (each is root or not each.awaits_fork)
    ]


def _check_families(state: SchedulerState) -> None:
    rows = state.rows
    if rows.num_reserved != sum(root.num_reserved_rows for root in state.families.values()):
        raise InvariantError("reserved rows miscounted")
    if rows.num_free < 0:
        raise InvariantError("more rows are reserved than free")
    for row, root in state.families.items():
        if rows.owners[row] is not root:
            raise InvariantError(f"row {row} runs for a family that it does not belong to")
    known = {row for row, owner in enumerate(rows.owners) if owner is not None}
    if not known.issuperset(state.shared_tails) or not known.issuperset(state.pending_forks):
        raise InvariantError("a fork or a shared block is noted of a row that nobody has")
    for fork in state.pending_forks.values():
        if fork.parent_row not in known or fork.parent_row in state.released_rows:
            raise InvariantError(f"row {fork.parent_row} is released before it is forked")
    for root, beams in state.beams.items():
        holds = [lane.row is not None for lane in beams.lanes]
        if root.finish_reason is not None or any(holds) != all(holds):
            raise InvariantError(f"some beams of {root.request_id} run without the others")
