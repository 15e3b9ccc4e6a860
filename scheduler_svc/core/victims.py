"""Whose blocks are taken when memory is short.

Whatever the policy: of those whose blocks nobody else holds too, lower priority goes first, and
a request that has just come back goes last.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.free_block_queue import NULL_BLOCK
from scheduler_svc.core.group_blocks import num_shared_columns
from scheduler_svc.core.request import Request
from scheduler_svc.core.rows import Rows

PROTECTED_TOKENS = 16
"""Tokens that a resumed request gains before it may be a victim again; doubled each time."""

Costs = Callable[[Sequence[Request], Rows, BlockPool, int], list[int]]
"""Tokens to compute again for each of some running requests, of a pool with such blocks."""


@dataclass(frozen=True, slots=True)
class VictimPolicy:
    """Whom it costs least to preempt, and how long it is cheaper to preempt nobody."""

    costs: Costs

    pause_tokens: int = 0
    """What a row that needs a block and does not run for a step weighs, in tokens computed
    again. While pauses weigh less than the victim, rows pause. 0: none ever does."""

    def __call__(
        self, candidates: Sequence[Request], rows: Rows, pool: BlockPool, block_size: int
    ) -> Request:
        """Return the victim among running requests, at least one; of equals the newest.

        Cost: O(candidates), in steps that are short of blocks only.
        """
        return _first(candidates, self.costs(candidates, rows, pool, block_size), rows, pool)


def _tokens_again(
    candidates: Sequence[Request], rows: Rows, pool: BlockPool, block_size: int
) -> list[int]:
    """Return the tokens that each would compute again.

    Tokens in leading blocks that others hold too will be hit when it resumes, and count as
    nothing. Its other named blocks do not: idle blocks die soon where memory is short. Nor
    does a request count whose last token is on its way, since it will not resume.
    """
    places = [rows.row_of(request) for request in candidates]
    computed = rows.num_computed[places].tolist()
    known = (rows.num_tokens + rows.num_pending)[places].tolist()
    return [
        _cost(request, tokens, pool, block_size) if length < request.limit else 0
        for request, tokens, length in zip(candidates, computed, known, strict=True)
    ]


def _nothing(
    candidates: Sequence[Request], rows: Rows, pool: BlockPool, block_size: int
) -> list[int]:
    del rows, pool, block_size
    return [0] * len(candidates)


# A step of a small batch takes the time of about 100 computed tokens, so a row's share of it is
# about 4. Less saves more tokens, and more time goes by in which rows do not run (ADR 0015).
cheapest = VictimPolicy(_tokens_again, pause_tokens=4)
"""The request with the fewest tokens to compute again, once pausing others has cost as much."""

newest = VictimPolicy(_nothing)
"""The request that arrived last, at once."""

VICTIM_POLICIES: Mapping[str, VictimPolicy] = {"cheapest": cheapest, "newest": newest}


def _first(
    candidates: Sequence[Request], costs: Sequence[int], rows: Rows, pool: BlockPool
) -> Request:
    order = [
        (
            _frees_nothing(request, pool),
            -request.priority,
            _is_protected(request, rows),
            cost,
            -request.sequence,
            -request.index,
        )
        for request, cost in zip(candidates, costs, strict=True)
    ]
    return candidates[order.index(min(order))]


def _cost(request: Request, num_computed: int, pool: BlockPool, block_size: int) -> int:
    """Return the tokens to compute again; beams leave together, so theirs are added up."""
    if request.beam is not None:
        held = {block for lane in request.family for block in lane.blocks if block != NULL_BLOCK}
        return len(held) * block_size // pool.num_groups
    return num_computed - num_shared_columns(request.blocks, pool) * block_size


def _frees_nothing(request: Request, pool: BlockPool) -> bool:
    num_shared = num_shared_columns(request.blocks, pool) * pool.num_groups
    return request.beam is None and num_shared == len(request.blocks)


def _is_protected(request: Request, rows: Rows) -> bool:
    if not request.num_preemptions:
        return False
    gained = int(rows.num_tokens[rows.row_of(request)]) - request.tokens_when_admitted
    return gained < PROTECTED_TOKENS << (request.num_preemptions - 1)
