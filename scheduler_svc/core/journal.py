"""The steps in flight: what each will answer, and which names rest on it.

Names are given when a step is planned, before its keys and values exist. Until the result
arrives they are unconfirmed: the journal knows them, so that a lost step takes them back.
"""

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.free_block_queue import BlockId
from scheduler_svc.core.request import Request
from scheduler_svc.core.step_plan import IndexArray, Int32Array


class GivenBack(NamedTuple):
    """A block that a request gave back, since no token to come sees it."""

    giver: Request
    block: BlockId

    is_own: bool
    """It wrote the block. False: the block was a hit."""


@dataclass(slots=True, eq=False)
class FlyingStep:
    """A planned step without a result."""

    step_id: int
    """The plan's."""

    rows: IndexArray
    """[R] Rows that run, ascending."""

    generations: Int32Array
    """[R] Whose they were: `Rows.generation` when the step was planned."""

    samples: npt.NDArray[np.bool_]
    """[R] Whether the row samples for itself alone."""

    families: dict[int, Request] = field(default_factory=dict)
    """Rows that sample for a family, ascending, and their owners."""

    asking: npt.NDArray[np.bool_] | None = None
    """[R] Whether the row samples, and wants to know of its tokens. None: no row does."""

    prompts: dict[int, range] = field(default_factory=dict)
    """Rows that want to know of their prompts, and the positions told by this step."""

    pooled: dict[int, Request] = field(default_factory=dict)
    """Rows that get a vector in place of a token, and their owners."""

    drafts: dict[int, Int32Array] = field(default_factory=dict)
    """Rows that verify drafted tokens, and these."""

    orphans: dict[int, Request] = field(default_factory=dict)
    """Preempted requests that still get what their old row samples here."""

    published: list[tuple[int, BlockId]] = field(default_factory=list)
    """Blocks named on the strength of this step, each with the row that fills it."""

    given_back: list[GivenBack] = field(default_factory=list)
    """Blocks behind their windows that requests gave back while this step was the newest."""

    def sampling(self, failed: Collection[int]) -> npt.NDArray[np.bool_]:
        """[R] Whether the row samples and is none of the `failed`."""
        return self.samples & ~np.isin(self.rows, list(failed)) if failed else self.samples

    def ran_for(self, row: int, generation: int) -> bool:
        """Whether the row runs in this step for the request of that generation."""
        place = int(np.searchsorted(self.rows, row))
        return (
            place < len(self.rows)
            and int(self.rows[place]) == row
            and int(self.generations[place]) == generation
        )


class Journal:
    """The flying steps, oldest first. Bounded by the pipeline depth."""

    __slots__ = ("_steps",)

    def __init__(self) -> None:
        self._steps: deque[FlyingStep] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[FlyingStep]:
        return iter(self._steps)

    @property
    def oldest(self) -> FlyingStep | None:
        """Step whose result comes next."""
        return self._steps[0] if self._steps else None

    @property
    def newest(self) -> FlyingStep | None:
        """Step that was planned last."""
        return self._steps[-1] if self._steps else None

    @property
    def oldest_step_id(self) -> int | None:
        """Its number."""
        return self._steps[0].step_id if self._steps else None

    def add(self, step: FlyingStep) -> None:
        """Append the newest step."""
        self._steps.append(step)

    def pop(self) -> FlyingStep:
        """Remove and return the oldest step. There must be one."""
        return self._steps.popleft()

    def note_published(self, published: list[tuple[int, BlockId]]) -> None:
        """Record names that rest on the newest step, if any is in flight."""
        if self._steps:
            self._steps[-1].published += published

    def adopt(self, request: Request, row: int, generation: int) -> int:
        """Let a preempted request have what its row still samples; return how many tokens."""
        pending = 0
        for step in self._steps:
            if step.ran_for(row, generation):
                step.orphans[row] = request
                samples = bool(step.samples[np.searchsorted(step.rows, row)])
                pending += samples or row in step.families or row in step.pooled
        return pending

    def num_drafted(self, row: int, generation: int) -> int:
        """Return how many tokens a request's row runs that were drafted."""
        return sum(
            len(step.drafts[row])
            for step in self._steps
            if row in step.drafts and step.ran_for(row, generation)
        )

    def clear(self) -> list[BlockId]:
        """Forget every step; return the blocks whose names rested on them."""
        unconfirmed = [block for step in self._steps for _, block in step.published]
        self._steps.clear()
        return unconfirmed
