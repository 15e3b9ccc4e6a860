"""The adapters that requests can name: loaded into every worker, used, replaced and unloaded."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import grpc
import structlog

from pagemill.v1 import worker_pb2
from scheduler_svc.core.errors import (
    AdapterLoadError,
    AdapterSlotsError,
    DeadlineError,
    UnavailableError,
    UnknownAdapterError,
)
from scheduler_svc.service.adapter_door import AdapterState
from scheduler_svc.service.field_bounds import quoted
from scheduler_svc.service.group_events import AdapterLost

LOAD_LIMIT_S = 300.0
"""Seconds that workers have to load adapters."""


class AdapterLink(Protocol):
    """A worker that has said ready."""

    def send_adapter(self, change: worker_pb2.AdapterChange) -> None:
        """Queue a change behind the plans that were sent."""

    def fail(self, code: grpc.StatusCode, reason: str) -> None:
        """End its stream."""


@dataclass(slots=True, eq=False)
class LoadedAdapter:
    """What is in a slot of every worker."""

    name: str
    path: str

    slot: int
    """From 1."""

    generation: int
    """Of the content."""

    num_users: int = 0
    """Requests that live."""

    retired: bool = False
    """No new request may use it; it goes with the last of its users."""

    gone: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, eq=False)
class _Load:
    """A load under way."""

    slot: int
    path: str
    waiting: set[AdapterLink]
    """Workers that have not answered."""

    done: asyncio.Future[int]
    """Generation of the content."""

    generations: set[int] = field(default_factory=set)
    error: str = ""


@dataclass(slots=True, eq=False)
class _Join:
    """A worker that loads what others had, before it gets plans."""

    waiting: dict[int, LoadedAdapter]
    """By the number of the change."""

    ready: Callable[[Sequence[AdapterLost]], None]
    timer: asyncio.TimerHandle
    lost: list[AdapterLost] = field(default_factory=list)


class AdapterDesk:
    """Knows slots, names and users. Everything here runs on the engine's event loop.

    A name points to one adapter; one that was replaced or unloaded keeps its slot, retired,
    until its last request has ended. So a request has the same weights from beginning to end.
    """

    def __init__(self, max_adapters: int) -> None:
        self._max_adapters = max_adapters
        self._names: dict[str, LoadedAdapter] = {}
        self._slots: dict[int, LoadedAdapter | None] = {}
        """Slots that are taken; by None while an adapter is loaded into it."""
        self._used_slots: set[int] = set()
        """Slots in which a worker may have something."""
        self._names_loading: set[str] = set()
        self._links: list[AdapterLink] = []
        self._loads: dict[int, _Load] = {}
        self._joins: dict[AdapterLink, _Join] = {}
        self._next_number = 1
        self._log = structlog.get_logger("adapters")

    # For requests.

    @contextmanager
    def using(self, name: str) -> Iterator[LoadedAdapter | None]:
        """Keep the adapter of a name, or None for the empty one, while the block lasts.

        Raises: UnknownAdapterError.
        """
        if not name:
            yield None
            return
        adapter = self._find(name)
        adapter.num_users += 1
        try:
            yield adapter
        finally:
            adapter.num_users -= 1
            self._free_if_done(adapter)

    def loaded(self) -> tuple[AdapterState, ...]:
        """Return what requests can name, in order of name."""
        adapters = sorted(self._names.items())
        return tuple(AdapterState(name, adapter.generation) for name, adapter in adapters)

    # For administrators.

    async def load(self, name: str, path: str) -> int:
        """Load an adapter into every worker, and return its generation.

        Raises: UnavailableError, AdapterSlotsError, AdapterLoadError, DeadlineError.
        """
        if not self._links:
            raise UnavailableError("no worker is ready to load an adapter")
        if name in self._names_loading:
            raise AdapterLoadError(f"adapter {quoted(name)} is being loaded by another call")
        slot = self._free_slot()
        self._slots[slot] = None
        self._names_loading.add(name)
        adapter: LoadedAdapter | None = None
        try:
            adapter = LoadedAdapter(name, path, slot, await self._load_into(slot, path))
        finally:
            self._names_loading.discard(name)
            if adapter is None:
                self._empty(slot)
        self._log.info(
            "adapter loaded", name=name, path=path, generation=f"{adapter.generation:016x}"
        )
        old = self._names.get(name)
        if old is not None and old.generation == adapter.generation:
            self._empty(slot)
            return old.generation
        self._slots[slot] = self._names[name] = adapter
        if old is not None:
            self._retire(old)
        return adapter.generation

    async def unload(self, name: str) -> None:
        """Refuse an adapter to new requests, and return when the last that uses it has ended.

        Waits as long as the caller does.

        Raises: UnknownAdapterError.
        """
        adapter = self._find(name)
        del self._names[name]
        self._log.info("adapter unloading", name=name, users=adapter.num_users)
        self._retire(adapter)
        await adapter.gone.wait()

    # For the worker group.

    def join(self, link: AdapterLink, ready: Callable[[Sequence[AdapterLost]], None]) -> None:
        """Bring a worker that is ready to what others have; call `ready` when it has it.

        What it could not load is lost, and told to `ready`. It takes part in loads under way,
        which end when it has answered, too.
        """
        loaded = [adapter for adapter in self._slots.values() if adapter is not None]
        for slot in sorted(self._used_slots - self._slots.keys()):
            self._send([link], slot)
        timer = asyncio.get_running_loop().call_later(LOAD_LIMIT_S, self._give_up, link)
        waiting = {
            self._send([link], each.slot, each.path, each.generation): each for each in loaded
        }
        for number, load in self._loads.items():
            load.waiting.add(link)
            self._send_change([link], number, load.slot, load.path)
        self._joins[link] = _Join(waiting, ready, timer)
        self._end_join(link)

    def leave(self, link: AdapterLink) -> None:
        """Forget a worker; loads that waited for it fail."""
        if link in self._links:
            self._links.remove(link)
        if (join := self._joins.pop(link, None)) is not None:
            join.timer.cancel()
        for load in self._loads.values():
            if link in load.waiting and not load.done.done():
                load.done.set_exception(UnavailableError("a worker was lost while it loaded"))

    def answer(self, link: AdapterLink, answer: worker_pb2.AdapterAnswer) -> None:
        """Note how a load ended. An answer that nobody waits for says nothing."""
        reason = answer.error or ("" if answer.generation else "the worker does not say why")
        join, load = self._joins.get(link), self._loads.get(answer.number)
        if join is not None and answer.number in join.waiting:
            adapter = join.waiting.pop(answer.number)
            if not reason and answer.generation != adapter.generation:
                reason = f"what lies at {adapter.path!r} has changed: load it again"
            if reason:
                self._lose(adapter, reason, join)
            self._end_join(link)
        elif load is not None and link in load.waiting:
            load.waiting.discard(link)
            load.generations.add(answer.generation)
            load.error = load.error or reason
            self._end_load(load)

    # How.

    def _find(self, name: str) -> LoadedAdapter:
        adapter = self._names.get(name)
        if adapter is None:
            names = ", ".join(map(quoted, sorted(self._names))) or "none"
            raise UnknownAdapterError(f"adapter {quoted(name)} is not loaded; loaded: {names}")
        return adapter

    def _free_slot(self) -> int:
        for slot in range(1, self._max_adapters + 1):
            if slot not in self._slots:
                return slot
        raise AdapterSlotsError(
            f"{len(self._slots)} adapters are loaded, or unloaded and still in use; at most "
            f"{self._max_adapters} may be: see max_loras"
        )

    async def _load_into(self, slot: int, path: str) -> int:
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        load = _Load(slot, path, set(self._everybody()), done)
        number = self._send(self._everybody(), slot, path)
        self._loads[number] = load
        try:
            async with asyncio.timeout(LOAD_LIMIT_S):
                return await done
        except TimeoutError:
            raise DeadlineError(f"no worker loaded it within {LOAD_LIMIT_S:g} s") from None
        finally:
            del self._loads[number]

    def _end_load(self, load: _Load) -> None:
        if load.waiting or load.done.done():
            return
        if len(load.generations) > 1 and not load.error:
            load.error = "workers find different contents there"
        if load.error:
            load.done.set_exception(AdapterLoadError(load.error))
        else:
            load.done.set_result(load.generations.pop())

    def _end_join(self, link: AdapterLink) -> None:
        join = self._joins[link]
        if join.waiting:
            return
        del self._joins[link]
        join.timer.cancel()
        self._links.append(link)
        join.ready(join.lost)

    def _give_up(self, link: AdapterLink) -> None:
        reason = f"its adapters were not loaded within {LOAD_LIMIT_S:g} s"
        link.fail(grpc.StatusCode.ABORTED, reason)

    def _lose(self, adapter: LoadedAdapter, reason: str, join: _Join) -> None:
        if self._slots.get(adapter.slot) is not adapter:
            # It went while the worker loaded it.
            return
        if self._names.get(adapter.name) is adapter:
            del self._names[adapter.name]
        self._log.error("adapter lost", name=adapter.name, reason=reason)
        message = f"adapter {quoted(adapter.name)} could not be loaded again: {reason}"
        join.lost.append(AdapterLost(adapter.slot, message))
        self._retire(adapter)

    def _retire(self, adapter: LoadedAdapter) -> None:
        adapter.retired = True
        self._free_if_done(adapter)

    def _free_if_done(self, adapter: LoadedAdapter) -> None:
        if adapter.retired and not adapter.num_users and not adapter.gone.is_set():
            adapter.gone.set()
            self._empty(adapter.slot)

    def _empty(self, slot: int) -> None:
        self._send(self._everybody(), slot)
        del self._slots[slot]

    def _everybody(self) -> list[AdapterLink]:
        """Return who has what is loaded, and who is about to have it."""
        return [*self._links, *self._joins]

    def _send(
        self, links: Sequence[AdapterLink], slot: int, path: str = "", generation: int = 0
    ) -> int:
        """Send a change, a drop without a path, and return its number."""
        self._used_slots.add(slot)
        number, self._next_number = self._next_number, self._next_number + 1
        self._send_change(links, number, slot, path, generation)
        return number

    def _send_change(
        self,
        links: Sequence[AdapterLink],
        number: int,
        slot: int,
        path: str,
        generation: int = 0,
    ) -> None:
        for link in links:
            link.send_adapter(
                worker_pb2.AdapterChange(
                    adapter=slot, path=path, generation=generation, number=number
                )
            )
