"""Forks that no plan has carried yet, and who takes a parent's row if the parent leaves before."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PendingFork:
    """A row that shall continue another."""

    parent_row: int
    """May be the row itself, which then goes on as another sequence, or with another token."""

    last_token: int
    """The token it continues with."""

    num_blocks: int
    """Blocks it takes over."""

    is_new: bool
    """Workers do not know the row, so that it need not be released."""
