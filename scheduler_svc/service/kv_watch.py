"""What the core tells of its KV memory, handed on after each turn of the engine's loop."""

import asyncio
from collections.abc import Callable

import structlog

from scheduler_svc.core.kv_memory import KvMemory
from scheduler_svc.service.kv_event_feed import KvEventFeed
from scheduler_svc.service.metrics import ResidencyMetrics


class KvWatch:
    """Hands on events, pins that ended and lives that ended; wakes the loop when a pin is due."""

    def __init__(
        self,
        memory: KvMemory,
        wake: Callable[[], None],
        *,
        residency: ResidencyMetrics | None = None,
        feed: KvEventFeed | None = None,
    ) -> None:
        self._pins = memory.pins
        self._events = memory.events
        self._wake = wake
        self._residency = residency
        self._feed = feed
        self._due_ns: int | None = None
        self._log = structlog.get_logger("kv_memory")

    def turn(self, now_ns: int) -> None:
        """Take what piled up since the last turn. Monotonic clock, nanoseconds.

        Cost: 0.2 us if nothing did.
        """
        if self._residency is not None:
            self._residency.collect_lives()
        if self._events is not None and self._feed is not None:
            self._feed.publish(self._events.take())
        for pin in self._pins.take_ended():
            self._log.info("pin ended", pin=pin.number, cause=pin.cause.value)
        if self._pins.num_blocks:
            self._wake_when_due(now_ns)

    def _wake_when_due(self, now_ns: int) -> None:
        """Let the loop run when the next pin's time is over, though nothing else happens.

        A timer that is not needed any more wakes the loop once for nothing.
        """
        due_ns = self._pins.next_expiry_ns
        if due_ns is not None and due_ns != self._due_ns:
            self._due_ns = due_ns
            delay_s = max(0, due_ns - now_ns) / 1e9
            asyncio.get_running_loop().call_later(delay_s, self._wake)
