"""Beams in rows: what a choice of the search does to them, and how the search ends."""

from array import array

from scheduler_svc.core.beam_family import BeamFamily
from scheduler_svc.core.beam_options import BeamOptions
from scheduler_svc.core.beam_search import BeamSearch, Continuation
from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.departure import end
from scheduler_svc.core.pending_fork import PendingFork
from scheduler_svc.core.request import Request
from scheduler_svc.core.state import SchedulerState
from scheduler_svc.core.step_plan import Float32Array, Int32Array, StepOutcome


def begin_search(state: SchedulerState, root: Request, beam: BeamOptions) -> None:
    """Begin the search of a request that is admitted with its prompt alone."""
    search = BeamSearch(beam, root.stopping, root.limit - root.num_prompt_tokens)
    state.beams[root] = BeamFamily(root, search, [root])


def receive_candidates(
    state: SchedulerState,
    lane: Request,
    candidates: tuple[Int32Array, Float32Array],
    pool: BlockPool,
    now_ns: int,
    outcome: StepOutcome,
) -> None:
    """Take what one beam could go on with; choose once all beams have answered."""
    family = state.beams[lane.root]
    state.rows.num_pending[state.rows.row_of(lane)] -= 1
    family.received[lane] = candidates
    outcome.searching.append(lane.root)
    if len(family.received) < len(family.lanes):
        return
    # Before others share its blocks, or they would name them again.
    state.prefixes.publish_filled(pool)
    root, search = family.root, family.search
    root.first_token_ns = root.first_token_ns or now_ns
    search.max_output = root.limit - root.num_prompt_tokens
    going = search.advance([family.received[each] for each in family.lanes])
    if search.done:
        _finish(state, family, now_ns, outcome)
    else:
        _go_on(state, family, going, pool)


def _finish(state: SchedulerState, family: BeamFamily, now_ns: int, outcome: StepOutcome) -> None:
    root = family.root
    root.hypotheses = family.search.best()
    best = root.hypotheses[0]
    state.counters.generation_tokens += sum(len(each.tokens) for each in root.hypotheses)
    root.last_step_id = outcome.step_id
    root.stop_token_id = best.stop_token_id
    prompt = root.tokens[: root.num_prompt_tokens]
    end(state, root, best.reason, now_ns)
    root.tokens = prompt + array("i", best.tokens)
    outcome.finished.append(root)


def _go_on(
    state: SchedulerState, family: BeamFamily, going: list[Continuation], pool: BlockPool
) -> None:
    """Let each continuation have a row: the first of a beam keeps it, others fork from it.

    They take the rows of dropped beams, whose blocks return at once.
    """
    rows = state.rows
    parents = [family.lanes[parent] for parent, _ in going]
    lanes = _assign(family.root, parents)
    moved = [(lane, parent) for lane, parent in zip(lanes, parents, strict=True) if lane != parent]
    dropped = [lane.blocks for lane, _ in moved]
    new_rows = _fork_lanes(state, family.root, moved, pool)
    for blocks in dropped:
        pool.release(blocks[::-1])
    for lane, parent, (_, token) in zip(lanes, parents, going, strict=True):
        row, parent_row = rows.row_of(lane), rows.row_of(parent)
        if lane is not parent or token != int(family.received[lane][0][0]):
            fork = PendingFork(parent_row, token, int(rows.num_blocks[row]), row in new_rows)
            state.pending_forks[row] = fork
        length = int(rows.num_tokens[row])
        if lane is not parent and length % state.limits.block_size:
            state.shared_tails |= {row, parent_row}
        rows.tokens[row, length] = token
        rows.num_tokens[row] = length + 1
        rows.limit[row] = length + 2
        state.families[row] = lane
    family.lanes = lanes
    family.received.clear()


def _assign(root: Request, parents: list[Request]) -> list[Request]:
    """Return who holds each continuation: of a beam's the first stays, others are spare ones."""
    staying = set(parents)
    spare = iter([each for each in root.family if each not in staying])
    lanes = []
    for parent in parents:
        lanes.append(parent if parent in staying else next(spare))
        staying.discard(parent)
    return lanes


def _fork_lanes(
    state: SchedulerState, root: Request, moved: list[tuple[Request, Request]], pool: BlockPool
) -> set[int]:
    """Let lanes share the blocks of others, in rows of their own; return the rows that are new."""
    rows, new_rows = state.rows, set()
    rows.num_reserved -= root.num_reserved_rows
    root.num_reserved_rows, root.awaits_fork = 0, False
    for lane, parent in moved:
        lane.blocks = list(parent.blocks)
        pool.share(lane.blocks)
        lane.hashes = list(parent.hashes)
        lane.admitted_tokens = parent.admitted_tokens
        if lane.row is not None:
            rows.copy(rows.row_of(parent), lane.row)
            continue
        lane.awaits_fork, lane.sequence, lane.limit = False, root.sequence, root.limit
        lane.precedence = (*root.precedence[:2], lane.index)
        new_rows.add(rows.fork(lane, rows.row_of(parent)))
    return new_rows
