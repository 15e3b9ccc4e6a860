"""A plan in the making: rows and their tokens, gathered until the budget or memory ends."""

from dataclasses import dataclass, field

import numpy as np

from scheduler_svc.core.free_block_queue import BlockId
from scheduler_svc.core.request import Request
from scheduler_svc.core.step_plan import (
    EMPTY,
    AdmittedRow,
    AppendedBlocks,
    Draft,
    ForkedRow,
    IndexArray,
    Int32Array,
    StepPlan,
)


@dataclass(slots=True)
class StepDraft:
    """What the step shall hold so far."""

    budget: int
    """Tokens the step may still take."""

    num_tokens: int = 0
    """Tokens it takes so far."""

    num_new: Int32Array = field(default_factory=lambda: EMPTY)
    """[all rows] Tokens that rows run which were running before; 0 for none."""

    appended_rows: list[int] = field(default_factory=list)
    """One row per column of blocks that is appended …"""

    appended_blocks: list[BlockId] = field(default_factory=list)
    """… and the blocks of each column, one of each KV group."""

    copies: dict[int, tuple[list[BlockId], list[BlockId]]] = field(default_factory=dict)
    """Sources and destinations of the column that a row gets copies of …"""

    cuts: dict[int, int] = field(default_factory=dict)
    """… and how many blocks of its table it keeps before it."""

    admitted: list[Request] = field(default_factory=list)
    """Requests that get a row in this step …"""

    admitted_num_new: list[int] = field(default_factory=list)
    """… and the tokens each runs."""

    published: list[tuple[int, BlockId]] = field(default_factory=list)
    """Rows admitted in this step, and the blocks they fill that were named for it."""

    drafts: dict[int, Int32Array] = field(default_factory=dict)
    """Tokens that rows verify behind their last known one. `num_new` counts them."""

    held: IndexArray = field(default_factory=lambda: np.zeros(0, dtype=np.intp))
    """Rows that wait for their token in flight, to draft behind it."""

    num_preempted: int = 0
    """Requests that lost their blocks for this step."""

    num_paused: int = 0
    """Rows that do not run in this step since blocks are short."""

    promised_blocks: int = 0
    """Blocks that rows still need for the tokens they know, behind this step's."""

    num_long_prefills: int = 0
    """Rows with more tokens to compute than one step gives them."""

    def drop(self, row: int) -> None:
        """Let a row that was running do nothing after all; it is about to lose its blocks."""
        self.take(-int(self.num_new[row]))
        self.num_new[row] = 0
        self.copies.pop(row, None)
        self.cuts.pop(row, None)
        self.drafts.pop(row, None)
        if row in self.appended_rows:
            kept = [other != row for other in self.appended_rows]
            num_groups = len(self.appended_blocks) // len(kept)
            self.appended_rows = [other for other in self.appended_rows if other != row]
            self.appended_blocks = [
                block
                for place, block in enumerate(self.appended_blocks)
                if kept[place // num_groups]
            ]

    def add(self, request: Request, num_new: int) -> None:
        """Let an admitted request run some tokens."""
        self.admitted.append(request)
        self.admitted_num_new.append(num_new)
        self.take(num_new)

    def take(self, num_tokens: int) -> None:
        """Take tokens from the budget; give them back if there are less than none."""
        self.budget -= num_tokens
        self.num_tokens += num_tokens

    @property
    def has_rows(self) -> bool:
        """Something runs."""
        return self.num_tokens > 0

    def seal(
        self,
        step_id: int,
        *,
        reset: bool,
        released_rows: list[int],
        num_rows: int,
        forked: tuple[ForkedRow, ...],
        exceptions: tuple[Int32Array, Int32Array, Int32Array],
        admitted_rows: tuple[AdmittedRow, ...],
        serial_rows: list[int],
    ) -> StepPlan:
        """Return the finished plan."""
        sources, destinations = EMPTY, EMPTY
        if self.copies:
            pairs = np.array([*self.copies.values()], dtype=np.int32)  # [rows, 2, groups]
            sources, destinations = pairs[:, 0].ravel(), pairs[:, 1].ravel()
        appended: tuple[AppendedBlocks, ...] = ()
        if self.appended_rows:
            rows = np.array(self.appended_rows, dtype=np.int32)
            blocks = np.array(self.appended_blocks, dtype=np.int32)
            num_groups = len(blocks) // len(rows)
            appended = tuple(
                AppendedBlocks(group, rows, blocks[group::num_groups])
                for group in range(num_groups)
            )
        return StepPlan(
            step_id=step_id,
            reset=reset,
            released_rows=np.array(released_rows, dtype=np.int32) if released_rows else EMPTY,
            forked=forked,
            admitted=admitted_rows,
            appended=appended,
            copy_sources=sources,
            copy_destinations=destinations,
            exception_rows=exceptions[0],
            exception_num_computed_tokens=exceptions[1],
            exception_num_new_tokens=exceptions[2],
            num_rows=num_rows,
            num_tokens=self.num_tokens,
            num_preempted=self.num_preempted,
            drafts=tuple(Draft(row, self.drafts[row]) for row in sorted(self.drafts)),
            serial_rows=np.array(serial_rows, dtype=np.int32) if serial_rows else EMPTY,
        )
