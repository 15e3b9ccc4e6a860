"""A beam search that runs: which row holds which beam, and what has come back of the step."""

from dataclasses import dataclass, field

from scheduler_svc.core.beam_search import BeamSearch
from scheduler_svc.core.free_block_queue import BlockId
from scheduler_svc.core.request import Request
from scheduler_svc.core.step_plan import Float32Array, Int32Array


@dataclass(slots=True, eq=False)
class BeamFamily:
    """The beams of one request. They advance in lockstep: a token each, then a choice among all.

    Each beam is a member of the request's family, with a row while the family runs. Members have
    no fixed places: one whose beam is dropped continues another.
    """

    root: Request
    search: BeamSearch

    lanes: list[Request]
    """Who holds each beam, in the order of the search. Before the first choice the root alone."""

    received: dict[Request, tuple[Int32Array, Float32Array]] = field(default_factory=dict)
    """Candidates of beams whose step has answered, until all have."""

    blocked: dict[Request, tuple[Request, int]] = field(default_factory=dict)
    """Resumed lanes that share blocks another lane still fills: whose, and tokens in them."""

    def block_uses(self) -> dict[BlockId, int]:
        """Return the blocks of all lanes, each with how many of them hold it."""
        uses: dict[BlockId, int] = {}
        for lane in self.lanes:
            for block in lane.blocks:
                uses[block] = uses.get(block, 0) + 1
        return uses
