"""The waiting queue: whose turn it is, by arrival, by priority, or by fair shares of tokens.

A precedence is given when a request is queued and never changes, so a queue stays sorted by itself.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heapreplace
from operator import attrgetter

from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.request import Request
from scheduler_svc.core.step_plan import Int32Array
from scheduler_svc.core.tenant_shares import TenantShares

_precedence = attrgetter("precedence")


class WaitingQueue:
    """First come, first served. A preempted request waits in its order of arrival.

    Cost: O(log n) comparisons per request queued or taken.
    """

    __slots__ = ("_line", "num_tokens")

    def __init__(self) -> None:
        self._line: list[Request] = []
        self.num_tokens = 0
        """Known tokens of those who wait."""

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._line)

    def give_precedence(self, request: Request) -> None:
        """Set the precedence that a request has here. It need not be queued."""
        request.precedence = self._precedence_of(request)

    def ahead_of(self, request: Request) -> Sequence[Request]:
        """Return those whose turn comes before that of a request, which has its precedence."""
        return self._line[: bisect_left(self._line, request.precedence, key=_precedence)]

    def add(self, request: Request) -> None:
        """Queue a new or a preempted request."""
        self.enter(request)
        insort(self._line, request, key=_precedence)
        self.num_tokens += request.num_tokens

    def enter(self, request: Request) -> None:
        """Take note of a request that waits or runs; one that is forked into a row never waited."""
        self.give_precedence(request)

    def remove(self, request: Request) -> None:
        """Take a queued request out."""
        del self._line[bisect_left(self._line, request.precedence, key=_precedence)]
        self.num_tokens -= request.num_tokens

    def in_turn(self) -> Iterator[Request]:
        """Yield requests, next to be admitted first; each may be removed before the next."""
        place = 0
        while place < len(self._line):
            request = self._line[place]
            yield request
            place += place < len(self._line) and self._line[place] is request

    def yielding_to(self, request: Request, running: Sequence[Request]) -> list[Request]:
        """Return the running requests that may be preempted to let a waiting one in."""
        return []

    def behind(self, request: Request, running: Sequence[Request]) -> list[Request]:
        """Return the running requests that might go behind it if they lost their rows."""
        return [other for other in running if other.precedence > request.precedence]

    def charge(self, request: Request, num_tokens: int) -> None:
        """Note tokens that a request runs in the step that admits it."""

    def charge_rows(self, accounts: Int32Array, num_new: Int32Array) -> None:
        """Note tokens that rows run. Shapes: both [all rows]."""

    def forget(self, request: Request) -> None:
        """Note that a request has ended."""

    def _precedence_of(self, request: Request) -> tuple[int, int, int]:
        return 0, request.sequence, request.index


class PriorityQueue(WaitingQueue):
    """Lower priority values first, then order of arrival.

    With ageing, waiting `ageing_ns` is worth one step of priority. All who wait age alike, so
    their order never changes: it is that of `priority * ageing_ns + arrival_ns`.
    """

    __slots__ = ("_ageing_ns",)

    def __init__(self, ageing_ns: int = 0) -> None:
        super().__init__()
        self._ageing_ns = ageing_ns

    def yielding_to(self, request: Request, running: Sequence[Request]) -> list[Request]:
        """Return running requests of worse priority that have not aged past the waiting one.

        Who yields goes behind, so two requests can never take each other's place in turn.
        """
        priority, precedence = request.priority, request.precedence
        return [
            other
            for other in running
            if other.priority > priority and other.precedence > precedence
        ]

    def _precedence_of(self, request: Request) -> tuple[int, int, int]:
        if self._ageing_ns:
            aged = request.priority * self._ageing_ns + request.arrival_ns
            return aged, request.sequence, request.index
        return request.priority, request.sequence, request.index


class FairQueue(WaitingQueue):
    """The tenant that was served least, by its weight, goes next; within it, who came first.

    Cost: O(tenants) per step, O(log tenants) per request admitted.
    """

    __slots__ = ("_lines", "_shares")

    def __init__(self) -> None:
        super().__init__()
        self._lines: dict[int, list[Request]] = {}
        self._shares = TenantShares()

    def add(self, request: Request) -> None:
        """Queue a request."""
        super().add(request)
        if request.account is None:
            raise InvariantError(f"request {request.request_id} has no account")
        line = self._lines.setdefault(request.account, [])
        if not line:
            self._shares.join(request.account, self._lines.keys() - {request.account})
        insort(line, request, key=_precedence)

    def ahead_of(self, request: Request) -> Sequence[Request]:
        """Return those of its own tenant: others may be served before or behind."""
        for line in self._lines.values():
            if line[0].tenant == request.tenant:
                return line[: bisect_left(line, request.precedence, key=_precedence)]
        return []

    def behind(self, request: Request, running: Sequence[Request]) -> list[Request]:
        """Return all of other tenants, beside those of its own that came later."""
        return [
            other
            for other in running
            if other.tenant != request.tenant or other.precedence > request.precedence
        ]

    def enter(self, request: Request) -> None:
        """Open its tenant's account if need be, too."""
        super().enter(request)
        if request.account is None:
            request.account = self._shares.open(request.tenant, request.weight)

    def remove(self, request: Request) -> None:
        """Take a queued request out."""
        super().remove(request)
        if request.account is None:
            return
        line = self._lines[request.account]
        del line[bisect_left(line, request.precedence, key=_precedence)]
        if not line:
            del self._lines[request.account]
            self._shares.leave(request.account)

    def in_turn(self) -> Iterator[Request]:
        """Yield requests of the least served tenants first; each may be removed."""
        served = self._shares.served
        heap = [
            (float(served[account]), line[0].precedence, account, 0)
            for account, line in self._lines.items()
        ]
        heapify(heap)
        while heap:
            _, _, account, place = heap[0]
            request = self._lines[account][place]
            yield request
            line = self._lines.get(account, [])
            place += place < len(line) and line[place] is request
            if place < len(line):
                heapreplace(heap, (float(served[account]), line[place].precedence, account, place))
            else:
                heappop(heap)

    def charge(self, request: Request, num_tokens: int) -> None:
        """Charge the tenant of a request."""
        if request.account is not None:
            self._shares.charge(request.account, num_tokens)

    def charge_rows(self, accounts: Int32Array, num_new: Int32Array) -> None:
        """Charge the tenants of rows, all at once."""
        self._shares.charge_many(accounts, num_new)

    def forget(self, request: Request) -> None:
        """Close the tenant's account with its last request, unless it was served ahead."""
        if request.account is not None:
            self._shares.close(request.account)


def waiting_queue(policy: str, *, ageing_ns: int = 0) -> WaitingQueue:
    """Return an empty queue of policy `fcfs`, `priority` or `fair`. Raises: KeyError."""
    makers = {
        "fcfs": WaitingQueue,
        "priority": lambda: PriorityQueue(ageing_ns),
        "fair": FairQueue,
    }
    return makers[policy]()
