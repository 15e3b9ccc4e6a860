"""What a front end can ask about adapters."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class AdapterState:
    """An adapter that requests can name."""

    name: str

    generation: int
    """Of the content under the name."""


class AdapterDoor(Protocol):
    """Loading and unloading adapters."""

    async def load(self, name: str, path: str) -> int:
        """Load an adapter into every worker, and return its generation.

        Raises: UnavailableError, AdapterSlotsError, AdapterLoadError, DeadlineError.
        """

    async def unload(self, name: str) -> None:
        """Refuse an adapter to new requests; return when the last that uses it has ended.

        Waits as long as the caller does.

        Raises: UnknownAdapterError.
        """

    def loaded(self) -> Sequence[AdapterState]:
        """Return what requests can name, in order of name."""
