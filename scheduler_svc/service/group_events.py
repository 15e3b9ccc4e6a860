"""What a worker group tells the engine, and the box the engine finds it in."""

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import TypeAlias

from scheduler_svc.core.block_hash import BlockHash
from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.kv_groups import FULL_ATTENTION, KvGroup
from scheduler_svc.service.worker_wire import StepAnswer


@dataclass(frozen=True, slots=True)
class GroupReady:
    """The whole group has joined and takes plans of a new epoch."""

    epoch_number: int

    num_blocks: int
    """Usable blocks of the smallest rank."""

    root: BlockHash
    """Parent of the names of all its first blocks."""

    kept_cache: bool
    """True: the same processes came back with the blocks they had. False: it is empty."""

    kv_groups: tuple[KvGroup, ...] = FULL_ATTENTION
    """Of the model, in order."""


@dataclass(frozen=True, slots=True)
class GroupLost:
    """A rank has left: no result of the current epoch comes any more."""

    reason: str


@dataclass(frozen=True, slots=True)
class AdapterLost:
    """A worker came back that could not load an adapter again. Told before the group is ready."""

    slot: int

    reason: str
    """One sentence, for the requests that use it."""


@dataclass(frozen=True, slots=True)
class StepArrived:
    """The result of the oldest plan in flight. Times are of the scheduler's monotonic clock."""

    answer: StepAnswer
    num_bytes: int
    received_ns: int
    decoded_ns: int


GroupEvent: TypeAlias = GroupReady | GroupLost | AdapterLost | StepArrived


class Mailbox:
    """Events for the engine, in order, and one thing to wait for.

    Holds at most `pipeline_depth` results and the comings and goings since the engine last
    looked, which are no more than there were connections in that millisecond.
    """

    def __init__(self) -> None:
        self._events: deque[GroupEvent] = deque()
        self._wake = asyncio.Event()
        self._error: InvariantError | None = None

    def post(self, event: GroupEvent) -> None:
        """Add an event and wake the engine."""
        self._events.append(event)
        self._wake.set()

    def wake(self) -> None:
        """Wake the engine: there may be something to schedule."""
        self._wake.set()

    def fail(self, error: InvariantError) -> None:
        """Raise an error to the engine: it happened outside its loop, and must end it."""
        self._error = error
        self._wake.set()

    def take(self) -> list[GroupEvent]:
        """Take all events, oldest first."""
        events = list(self._events)
        self._events.clear()
        return events

    async def wait(self) -> None:
        """Return once someone has called `post` or `wake` since this last returned.

        Without a deadline: an engine without work has nothing to miss.

        Raises: InvariantError that was left by `fail`.
        """
        await self._wake.wait()
        self._wake.clear()
        if self._error is not None:
            raise self._error
