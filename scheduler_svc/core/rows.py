"""The running requests' progress as columns, one place per row.

A step over hundreds of rows touches these arrays a few times each and makes no object per
row. It reads whole columns, since numpy adds a thousand numbers in less time than it gathers a
hundred; so a row without a request holds zeros, which ask for nothing. What is read once per
request, not once per step, stays on `Request`.
"""

from array import array
from heapq import heapify, heappop, heappush

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.request import Request
from scheduler_svc.core.step_plan import IndexArray, Int32Array

NO_TOKEN = -1

_STOP_KEYS = 1 << 16
"""Stop ids are counted by their lowest 16 bits: few ids share them, and the table stays small."""


class Rows:
    """`max_rows` places of at most `max_len` tokens.

    Shapes, R rows, L tokens, K stop ids, all int32:
        tokens             [R, L]  known ids; those behind num_tokens are stale
        num_prompt         [R]     tokens of the prompt
        num_tokens         [R]     tokens known
        num_pending        [R]     tokens that steps in flight will sample
        num_computed       [R]     tokens with keys and values, planned steps included
        num_last_new       [R]     tokens the row ran in the latest plan; 0: it did not run, or
                                   is admitted in the plan being made
        num_blocks         [R]     columns of the block tables: blocks in each KV group
        num_published      [R]     of these, columns whose blocks have a name
        limit              [R]     tokens at which the request ends
        first_stop         [R]     num_tokens from which stop ids count
        stop_ids           [R, K]  ids that end the row, padded with -1
        account            [R]     where a fair queue counts its tokens
        asks               [R]     what the row wants beside tokens, as bits of `Asks`
        generation         [R]     raised whenever the row changes hands
    """

    __slots__ = (
        "_flat_tokens",
        "_free",
        "_max_len",
        "_order",
        "_order_stale",
        "_stop_counts",
        "account",
        "asks",
        "first_stop",
        "generation",
        "limit",
        "num_blocks",
        "num_computed",
        "num_last_new",
        "num_pending",
        "num_prompt",
        "num_published",
        "num_reserved",
        "num_tokens",
        "owners",
        "running",
        "stop_ids",
        "tokens",
    )

    def __init__(self, max_rows: int, max_len: int) -> None:
        def column() -> Int32Array:
            return np.zeros(max_rows, dtype=np.int32)

        # Pages of this array are touched only as rows grow.
        self.tokens: Int32Array = np.zeros((max_rows, max_len), dtype=np.int32)
        self._flat_tokens = self.tokens.reshape(-1)
        self._max_len = max_len
        self.num_prompt = column()
        self.num_tokens = column()
        self.num_pending = column()
        self.num_computed = column()
        self.num_last_new = column()
        self.num_blocks = column()
        self.num_published = column()
        self.limit = column()
        self.first_stop = column()
        self.stop_ids: Int32Array = np.full((max_rows, 4), NO_TOKEN, dtype=np.int32)
        self._stop_counts: Int32Array = np.zeros(_STOP_KEYS, dtype=np.int32)
        self.account = column()
        self.asks = column()
        self.generation = column()
        self.owners: npt.NDArray[np.object_] = np.full(max_rows, None, dtype=object)
        self.running: list[Request] = []
        """Requests with a row, in order of precedence."""
        self.num_reserved = 0
        """Free rows that are kept for members of families still to be forked."""
        self._free = list(range(max_rows))
        heapify(self._free)
        self._order: IndexArray = np.zeros(0, dtype=np.intp)
        self._order_stale = False

    @property
    def _progress(self) -> tuple[Int32Array, ...]:
        """The columns that are 0 in a free row."""
        return (
            self.num_tokens,
            self.num_pending,
            self.num_computed,
            self.num_last_new,
            self.num_blocks,
            self.num_published,
            self.asks,
        )

    @property
    def has_room(self) -> bool:
        """A row is free."""
        return len(self._free) > self.num_reserved

    @property
    def num_free(self) -> int:
        """Rows that are free, and kept for nobody."""
        return len(self._free) - self.num_reserved

    @property
    def order(self) -> IndexArray:
        """[running] The rows in order of precedence. Valid until a row is taken or given back."""
        if self._order_stale:
            self._order = np.array([request.row for request in self.running], dtype=np.intp)
            self._order_stale = False
        return self._order

    def owner(self, row: int) -> Request:
        """Return the request in a row that has one."""
        request: Request | None = self.owners[row]
        if request is None:
            raise InvariantError(f"row {row} has no owner")
        return request

    def row_of(self, request: Request) -> int:
        """Return the row of a request that runs."""
        if request.row is None:
            raise InvariantError(f"request {request.request_id} has no row")
        return request.row

    def owners_of(self, rows: IndexArray) -> list[Request]:
        """Return the requests in rows that all have one."""
        requests: list[Request] = self.owners[rows].tolist()
        return requests

    def take(self, request: Request, num_computed: int, num_blocks: int) -> int:
        """Give a request the lowest free row, with its tokens and so many columns of blocks."""
        row = heappop(self._free)
        num_tokens = len(request.tokens)
        self.tokens[row, :num_tokens] = np.frombuffer(request.tokens, dtype=np.int32)
        self.num_prompt[row] = request.num_prompt_tokens
        self.num_tokens[row] = num_tokens
        self.num_pending[row] = 0
        self.num_computed[row] = num_computed
        self.num_blocks[row] = num_blocks
        self.num_published[row] = 0
        self.limit[row] = request.limit
        self.account[row] = request.account or 0
        self.asks[row] = request.reports.asks(request.prompt_table)
        self.first_stop[row] = request.num_prompt_tokens + request.stopping.min_output_tokens
        self._set_stop_ids(row, request.stopping.eos_token_ids | request.stopping.stop_token_ids)
        self._seat(request, row)
        return row

    def fork(self, request: Request, parent: int) -> int:
        """Give a request the lowest free row, with all that the parent's columns say."""
        row = heappop(self._free)
        self.copy(parent, row)
        self._seat(request, row)
        return row

    def hand_over(self, request: Request, heir: Request) -> None:
        """Give a request's row, and its place in order, to a member of its family."""
        row = self.row_of(request)
        request.tokens = self._tokens_of(row)
        request.row, heir.row = None, row
        self.owners[row] = heir
        self.running[self.running.index(request)] = heir

    def relocate(self, request: Request, to_row: int) -> int:
        """Move a request to a row that is free. Return the row it had."""
        row = self.row_of(request)
        self._free.remove(to_row)
        heapify(self._free)
        self.copy(row, to_row)
        self.owners[to_row] = request
        request.row = to_row
        self._clear(row)
        return row

    def copy(self, source: int, target: int) -> None:
        """Write into a row's columns, but for its owner, what another row's say."""
        length = int(self.num_tokens[source])
        self.tokens[target, :length] = self.tokens[source, :length]
        self._count_stop_ids(target, -1)
        self.stop_ids[target] = self.stop_ids[source]
        self._count_stop_ids(target, 1)
        facts = (self.num_prompt, self.limit, self.account, self.first_stop)
        for column in (*self._progress, *facts):
            column[target] = column[source]

    def _seat(self, request: Request, row: int) -> None:
        self.owners[row] = request
        request.row = row
        place = len(self.running)
        while place and self.running[place - 1].precedence > request.precedence:
            place -= 1
        self.running.insert(place, request)
        self._order_stale = True

    def give_back(self, request: Request) -> int:
        """Free a request's row, handing its tokens back to it. Return the row."""
        row = self.row_of(request)
        request.tokens = self._tokens_of(row)
        request.row = None
        self.running.remove(request)
        self._clear(row)
        return row

    def _clear(self, row: int) -> None:
        self.generation[row] += 1
        for column in self._progress:
            column[row] = 0
        self._set_stop_ids(row, frozenset())
        self.owners[row] = None
        heappush(self._free, row)
        self._order_stale = True

    def tokens_of(self, rows: IndexArray, starts: Int32Array, count: int) -> Int32Array:
        """[S * count] Tokens of rows, `count` from each start on. Shapes: rows, starts [S]."""
        first = rows * self._max_len + starts
        tokens: Int32Array = self._flat_tokens[(first[:, None] + np.arange(count)).reshape(-1)]
        return tokens

    def append(self, rows: IndexArray, sampled: Int32Array) -> Int32Array:
        """Append a pending token to each row; return how many it knows now. Shapes: all [S]."""
        length = self.num_tokens[rows]
        self._flat_tokens[rows * self._max_len + length] = sampled
        length += 1
        self.num_tokens[rows] = length
        self.num_pending[rows] -= 1
        return length

    def stops(self, rows: IndexArray, sampled: Int32Array) -> npt.NDArray[np.bool_]:
        """[S] Whether the id just appended to each row is one of its stop ids, and counts."""
        # Mostly no id is one that any row stops at.
        if not np.count_nonzero(self._stop_counts.take(sampled & (_STOP_KEYS - 1))):
            return np.zeros(len(sampled), dtype=np.bool_)
        hit: npt.NDArray[np.bool_] = np.any(self.stop_ids[rows] == sampled[:, None], axis=1)
        hit &= self.num_tokens[rows] >= self.first_stop[rows]
        return hit

    def _tokens_of(self, row: int) -> "array[int]":
        return array("i", self.tokens[row, : self.num_tokens[row]].tobytes())

    def _set_stop_ids(self, row: int, ids: frozenset[int]) -> None:
        width = self.stop_ids.shape[1]
        if len(ids) > width:
            more = np.full((len(self.owners), len(ids) - width), NO_TOKEN, dtype=np.int32)
            self.stop_ids = np.concatenate([self.stop_ids, more], axis=1)
        self._count_stop_ids(row, -1)
        self.stop_ids[row] = NO_TOKEN
        self.stop_ids[row, : len(ids)] = sorted(ids)
        self._count_stop_ids(row, 1)

    def _count_stop_ids(self, row: int, change: int) -> None:
        ids = self.stop_ids[row]
        np.add.at(self._stop_counts, ids[ids != NO_TOKEN] & (_STOP_KEYS - 1), change)

    def check(self) -> None:
        """Prove that free rows ask for nothing, and that stop ids are counted.

        Raises: InvariantError. Cost: O(rows); for tests.
        """
        free = self.owners == None  # noqa: E711 - element by element
        if sorted(self._free) != np.flatnonzero(free).tolist():
            raise InvariantError("a row is free and has an owner, or neither")
        if any(column[free].any() for column in self._progress):
            raise InvariantError("a free row holds a count")
        ids = self.stop_ids[self.stop_ids != NO_TOKEN] & (_STOP_KEYS - 1)
        if not np.array_equal(np.bincount(ids, minlength=_STOP_KEYS), self._stop_counts):
            raise InvariantError("stop ids are miscounted")
