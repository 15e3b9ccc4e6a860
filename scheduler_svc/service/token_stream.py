"""The tokens of one live request, piling up until its reader comes."""

import asyncio
from collections.abc import Callable
from typing import TypeAlias

from scheduler_svc.core.errors import RequestError, SlowReaderError
from scheduler_svc.core.request import FinishReason, Request
from scheduler_svc.service.engine_door import Accepted, Account, Finish, TokenBatch

MAX_PILED_TOKENS = 65_536
"""A reader that lets more tokens wait loses its request."""


class RequestStream:
    """One request's tokens between the engine, which pushes, and one reader, which iterates.

    The reader is woken once for all that came since it last read.
    """

    __slots__ = (
        "_cut",
        "_drained",
        "_error",
        "_finish",
        "_num_pushed",
        "_pile",
        "_step_id",
        "_stop",
        "_waiter",
        "accepted",
        "request",
    )

    def __init__(self, request: Request, stop: "StopAfter") -> None:
        self.request = request
        self.accepted = Accepted(
            request_id=request.request_id,
            num_prompt_tokens=request.num_prompt_tokens,
            max_output_tokens=request.limit - request.num_prompt_tokens,
            seed=request.sampling.seed,
        )
        self._stop = stop
        self._pile: list[int] = []
        self._num_pushed = 0
        self._step_id = 0
        self._finish: Finish | None = None
        self._error: RequestError | None = None
        self._cut: int | None = None
        self._drained = False
        self._waiter: asyncio.Future[None] | None = None

    # The engine's side.

    def push(self, token: int, step_id: int) -> bool:
        """Add a token. False if the pile is above its bound."""
        self._pile.append(token)
        self._num_pushed += 1
        self._step_id = step_id
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        return len(self._pile) <= MAX_PILED_TOKENS

    def end(self) -> None:
        """Tell the reader that the request has finished. Its reason is set."""
        if self._error is not None:
            return
        reason = self.request.finish_reason or FinishReason.ABORT
        self._finish = Finish(
            reason, self.request.stop_token_id, self.request.error, self.account()
        )
        self._wake()

    def fail(self, error: RequestError) -> None:
        """Raise an error to the reader, behind the tokens that piled up."""
        if self._finish is None and self._error is None:
            if isinstance(error, SlowReaderError):
                self._pile.clear()
            self._error = error
            self._wake()

    @property
    def reason(self) -> FinishReason | None:
        """How the request ended, as its reader was told. None: it lives."""
        return self._finish.reason if self._finish else self.request.finish_reason

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # The reader's side.

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> TokenBatch:
        """Return what piled up, waiting for it; deadline and drain bound the wait."""
        if self._drained:
            raise StopAsyncIteration
        while not self._pile and self._finish is None:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        batch = TokenBatch(tuple(self._pile), self._step_id, self._finish)
        self._pile.clear()
        self._drained = self._finish is not None
        return batch

    def finish(self, num_output_tokens: int) -> None:
        """End the output after this many tokens; see TokenStream."""
        if self._drained or self._error is not None:
            return
        self._stop(self.request, num_output_tokens)
        self._cut = num_output_tokens
        self._pile.clear()
        self._finish = Finish(FinishReason.STOP, None, "", self.account())

    def account(self) -> Account:
        """Return what the request cost so far."""
        request = self.request
        num_output_tokens = self._num_pushed if self._cut is None else self._cut
        return Account(
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=num_output_tokens,
            num_cached_tokens=request.num_cached_tokens,
            num_recomputed_tokens=request.num_recomputed_tokens,
            num_preemptions=request.num_preemptions,
            arrival_ns=request.arrival_ns,
            first_scheduled_ns=request.first_scheduled_ns,
            first_token_ns=request.first_token_ns,
            finished_ns=request.finished_ns,
            first_step_id=request.first_step_id,
            last_step_id=request.last_step_id,
            preemption_times_ns=tuple(request.preemption_times_ns),
            miss_reason=request.miss_reason,
        )


StopAfter: TypeAlias = Callable[[Request, int], None]
"""Ends a request as stopped, with only so many output tokens."""
