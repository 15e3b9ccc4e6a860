"""The requests whose readers have not left, and where their tokens pile up."""

import asyncio
from collections.abc import Sequence

from scheduler_svc.core.request import Request
from scheduler_svc.service.token_stream import Pile, RequestStream


class LiveStreams:
    """Streams by their requests, piles by the sequences that still get tokens."""

    def __init__(self) -> None:
        self.streams: dict[Request, RequestStream] = {}
        self.piles: dict[Request, Pile] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    def add(self, stream: RequestStream) -> None:
        """Note a stream that begins."""
        self.streams[stream.request] = stream
        self.piles.update((pile.request, pile) for pile in stream.piles)
        self._empty.clear()

    def remove(self, stream: RequestStream) -> None:
        """Forget a stream whose reader has left."""
        del self.streams[stream.request]
        if not self.streams:
            self._empty.set()

    def close_piles(self, stream: RequestStream) -> None:
        """Let a stream get no more tokens."""
        for request in stream.request.members:
            self.piles.pop(request, None)

    def live(self) -> list[RequestStream]:
        """Return the streams that have not ended."""
        return [stream for stream in self.streams.values() if stream.is_live]

    def named(self, tenant: str, ids: Sequence[str] | None) -> dict[str, list[RequestStream]]:
        """Return a tenant's streams that have not ended, by those of some ids that they answer to.

        They answer to the id of their call, and to their own. None: all, by the ids of calls.
        """
        found: dict[str, list[RequestStream]] = {}
        for stream in self.live():
            if stream.request.tenant == tenant:
                found.setdefault(stream.call_id, []).append(stream)
                if ids is not None and stream.request.request_id != stream.call_id:
                    found.setdefault(stream.request.request_id, []).append(stream)
        return found if ids is None else {name: found[name] for name in ids if name in found}

    def of_adapter(self, slot: int) -> list[RequestStream]:
        """Return the streams of an adapter's requests."""
        return [each for each in self.streams.values() if each.request.adapter_slot == slot]

    async def wait_until_empty(self) -> None:
        """Return when no reader is left. Waits as long as the caller does."""
        await self._empty.wait()
