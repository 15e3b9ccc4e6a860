"""The share of tokens found in the prefix cache, over the latest requests."""

from collections import deque


class HitRateWindow:
    """Queries and hits of at least the latest `max_requests` requests, if there were so many.

    Source: the reference engine's sliding window; its newest observation is always kept.
    """

    __slots__ = ("_hits", "_max_requests", "_queries", "_window", "num_requests")

    def __init__(self, max_requests: int = 1000) -> None:
        self._max_requests = max_requests
        self._window: deque[tuple[int, int, int]] = deque()
        self.num_requests = self._queries = self._hits = 0

    def observe(self, queries: int, hits: int, num_requests: int = 1) -> None:
        """Note tokens looked up, and found, for new requests. None at all: nothing is noted."""
        if not num_requests:
            return
        self._window.append((num_requests, queries, hits))
        self.num_requests += num_requests
        self._queries += queries
        self._hits += hits
        while len(self._window) > 1 and self.num_requests > self._max_requests:
            oldest = self._window.popleft()
            self.num_requests -= oldest[0]
            self._queries -= oldest[1]
            self._hits -= oldest[2]

    @property
    def rate(self) -> float:
        """Hits over queries. 0 without any."""
        return self._hits / self._queries if self._queries else 0.0
