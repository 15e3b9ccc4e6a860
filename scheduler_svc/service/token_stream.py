"""The tokens of one live request, piling up until its reader comes."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from scheduler_svc.core.errors import NeverFitsError, RequestError, SlowReaderError
from scheduler_svc.core.request import FinishReason, Request
from scheduler_svc.core.step_plan import StepOutcome
from scheduler_svc.core.told import PromptTable, TokenTold
from scheduler_svc.service.engine_door import Accepted, Account, Finish, Gain, TokenBatch

MAX_PILED_TOKENS = 65_536
"""A reader that lets more tokens wait, of all its sequences together, loses its request."""


class Pile:
    """What nobody has read of one sequence: tokens, and how it ended."""

    __slots__ = (
        "cut",
        "finish",
        "finish_is_told",
        "num_pushed",
        "request",
        "step_id",
        "stream",
        "tokens",
        "told",
    )

    def __init__(self, stream: "RequestStream", request: Request) -> None:
        self.stream = stream
        self.request = request
        self.tokens: list[int] = []
        self.told: list[TokenTold] = []
        """What is told of each of the tokens, if that was asked for."""
        self.num_pushed = 0
        self.step_id = 0
        self.finish: Finish | None = None
        self.cut: int | None = None
        """Output tokens that count, if a stop string said so."""
        self.finish_is_told = False
        """The reader knows of the end."""

    def push(self, token: int, step_id: int) -> bool:
        """Add a token. False if the piles of the stream are above their bound."""
        self.tokens.append(token)
        self.num_pushed += 1
        self.step_id = step_id
        stream = self.stream
        stream.num_piled += 1
        waiter = stream.waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        return stream.num_piled <= stream.most_piled

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the sequence that count."""
        return self.num_pushed if self.cut is None else self.cut


class RequestStream:
    """One request's tokens between the engine, which pushes, and one reader, which iterates.

    The reader is woken once for all that came since it last read, of whatever sequence.
    """

    __slots__ = (
        "_error",
        "_knows_prompt",
        "_num_ends",
        "_num_open",
        "_rest",
        "_stop",
        "accepted",
        "call_id",
        "most_piled",
        "num_piled",
        "piles",
        "request",
        "waiter",
    )

    def __init__(self, request: Request, stop: "StopAfter", call_id: str = "") -> None:
        self.request = request
        self.call_id = call_id or request.request_id
        self.accepted = Accepted(
            request_id=request.request_id,
            num_prompt_tokens=request.num_prompt_tokens,
            max_output_tokens=request.limit - request.num_prompt_tokens,
            seed=request.sampling.seed,
        )
        self._stop = stop
        members = request.members
        if request.beam is not None:
            # Beams come and go within the search; what is read are the hypotheses of its end.
            members = (request,) * request.beam.num_returned
        self.piles = [Pile(self, member) for member in members]
        """By sequence index."""
        self.num_piled = 0
        """Tokens that wait, over all piles."""
        self.most_piled = MAX_PILED_TOKENS // (1 + (request.reports.logprobs or 0))
        """Tokens that may wait: fewer if each has candidates with it."""
        self._knows_prompt = request.reports.prompt_logprobs is None
        """The reader has all that it asked to know of the prompt."""
        self._num_ends = 0
        """Sequences whose end waits."""
        self._num_open = len(self.piles)
        """Sequences whose end the reader does not know."""
        self._error: RequestError | None = None
        self._rest: asyncio.Future[None] | None = None
        """Of a reader that lets tokens pile up."""
        self.waiter: asyncio.Future[None] | None = None

    # The engine's side.

    def end_finished(self) -> None:
        """Tell the reader of the sequences that have finished. Their reasons are set."""
        if self._error is not None:
            return
        if self.request.hypotheses:
            self._take_hypotheses()
        for pile in self.piles:
            request = pile.request
            if pile.finish is None and request.finish_reason is not None:
                pile.finish = Finish(
                    request.finish_reason,
                    request.stop_token_id,
                    request.error,
                    vector=request.vector,
                )
                self._num_ends += 1
        self._wake()

    def end_unfit(self) -> None:
        """Tell the reader that a new pool cannot hold the request, whose end is set.

        One that has nothing yet is refused, as it is where the pool is known when it comes.
        """
        if self.account().num_output_tokens:
            self.end_finished()
        else:
            self.fail(NeverFitsError("prompt", self.request.error))

    def _take_hypotheses(self) -> None:
        hypotheses = self.request.hypotheses
        del self.piles[len(hypotheses) :]
        for pile, found in zip(self.piles, hypotheses, strict=True):
            pile.tokens = list(found.tokens)
            pile.num_pushed = len(found.tokens)
            pile.step_id = self.request.last_step_id or 0
            pile.finish = Finish(
                found.reason, found.stop_token_id, "", found.cumulative_logprob, found.score
            )
        self._num_ends = self._num_open = len(hypotheses)

    def fail(self, error: RequestError) -> None:
        """Raise an error to the reader, behind the tokens that piled up."""
        if self._error is None and any(pile.finish is None for pile in self.piles):
            if isinstance(error, SlowReaderError):
                for pile in self.piles:
                    pile.tokens.clear()
                    pile.told.clear()
                self.num_piled = self._num_ends = 0
            self._error = error
            self._wake()

    @property
    def is_live(self) -> bool:
        """Some sequence goes on."""
        return any(pile.request.finish_reason is None for pile in self.piles)

    @property
    def reasons(self) -> list[FinishReason | None]:
        """How the sequences ended, as their reader was told. None: it lives."""
        return [
            pile.finish.reason if pile.finish else pile.request.finish_reason for pile in self.piles
        ]

    @property
    def errors(self) -> tuple[str, ...]:
        """Why sequences could not be computed, each sentence once."""
        return tuple(dict.fromkeys(p.request.error for p in self.piles if p.request.error))

    def _wake(self) -> None:
        for waiter in (self.waiter, self._rest):
            if waiter is not None and not waiter.done():
                waiter.set_result(None)

    # The reader's side.

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> TokenBatch:
        """Return what piled up, waiting for it; deadline and drain bound the wait."""
        if not self._num_open:
            raise StopAsyncIteration
        while not self.num_piled and not self._num_ends:
            if self._error is not None:
                raise self._error
            self.waiter = asyncio.get_running_loop().create_future()
            await self.waiter
        self.num_piled = self._num_ends = 0
        gains = []
        for index, pile in enumerate(self.piles):
            has_ended = pile.finish is not None and not pile.finish_is_told
            if pile.tokens or has_ended:
                gains.append(
                    Gain(index, tuple(pile.tokens), pile.step_id, pile.finish, tuple(pile.told))
                )
                pile.tokens.clear()
                pile.told.clear()
                pile.finish_is_told = has_ended
                self._num_open -= has_ended
        account = None if self._num_open else self.account()
        return TokenBatch(tuple(gains), account, self._take_prompt_table(gains))

    def _take_prompt_table(self, gains: Sequence[Gain]) -> PromptTable | None:
        """Return what is told of the prompt with the first tokens behind it."""
        if self._knows_prompt or not any(gain.token_ids for gain in gains):
            return None
        self._knows_prompt = True
        # A prompt of one token has nothing to tell, and no part ever comes.
        return self.request.prompt_table or PromptTable(self.request.num_prompt_tokens, 0)

    async def rest(self, seconds: float) -> None:
        """Let tokens pile up; see TokenStream."""
        if not self._num_ends and self._error is None:
            self._rest = asyncio.get_running_loop().create_future()
            await asyncio.wait((self._rest,), timeout=seconds)
            self._rest = None

    def finish(self, sequence_index: int, num_output_tokens: int) -> None:
        """End a sequence after this many tokens; see TokenStream."""
        pile = self.piles[sequence_index]
        if pile.finish_is_told or self._error is not None:
            return
        self._stop(pile.request, num_output_tokens)
        pile.cut = num_output_tokens
        self.num_piled -= len(pile.tokens)
        pile.tokens.clear()
        pile.told.clear()
        self._num_ends += pile.finish is None
        pile.finish = Finish(FinishReason.STOP, None, "")

    def account(self) -> Account:
        """Return what the request cost so far, all its sequences together."""
        root, members = self.request, self.request.members
        ends = [member.finished_ns for member in members]
        drafts = [member.drafts for member in members if member.drafts is not None]
        return Account(
            num_prompt_tokens=root.num_prompt_tokens,
            num_output_tokens=sum(pile.num_output_tokens for pile in self.piles),
            num_cached_tokens=root.num_cached_tokens,
            num_recomputed_tokens=sum(member.num_recomputed_tokens for member in members),
            num_preemptions=sum(member.num_preemptions for member in members),
            arrival_ns=root.arrival_ns,
            first_scheduled_ns=root.first_scheduled_ns,
            first_token_ns=_first(member.first_token_ns for member in members),
            finished_ns=None if None in ends else _last(ends),
            first_step_id=root.first_step_id,
            last_step_id=_last(member.last_step_id for member in members),
            preemption_times_ns=tuple(
                sorted(time_ns for member in members for time_ns in member.preemption_times_ns)
            ),
            miss_reason=root.miss_reason,
            num_draft_tokens=sum(record.num_drafted for record in drafts),
            num_accepted_draft_tokens=sum(record.num_accepted for record in drafts),
        )


def _first(times: Iterable[int | None]) -> int | None:
    return min((time for time in times if time is not None), default=None)


def _last(times: Iterable[int | None]) -> int | None:
    return max((time for time in times if time is not None), default=None)


StopAfter: TypeAlias = Callable[[Request, int], None]
"""Ends a sequence as stopped, with only so many output tokens."""


def pile_told(piles: Mapping[Request, Pile], outcome: StepOutcome) -> None:
    """Add what a step told of tokens to the piles that these were pushed to; mostly nothing."""
    if not outcome.told:
        return
    for request in outcome.requests:
        if request in outcome.told and request in piles:
            piles[request].told.append(outcome.told[request])


def too_slow(stream: RequestStream) -> SlowReaderError:
    """Return the error of a reader that let too much pile up."""
    return SlowReaderError(
        f"more than {stream.most_piled} tokens piled up unread; the request was ended"
    )
