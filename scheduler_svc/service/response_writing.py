"""Tokens of a stream into the messages that its client reads."""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from pagemill.v1 import generation_pb2
from pagemill.v1.inference_pb2 import (
    Accepted,
    GenerateRequest,
    GenerateResponse,
    PositionLogprobs,
    Summary,
    Timing,
    Usage,
)
from scheduler_svc.core.request import FinishReason
from scheduler_svc.core.told import PromptTable
from scheduler_svc.service import engine_door
from scheduler_svc.service.engine_door import Account, Finish, Gain, TokenBatch, TokenStream
from scheduler_svc.service.position_logprobs import Piece, position_logprobs, prompt_logprobs
from scheduler_svc.service.text.output_text import OutputText
from scheduler_svc.service.text.stop_strings import StopMatch
from scheduler_svc.service.text.tokenizer import Tokenizer

# Making an entry takes a microsecond; so many are no pause for other streams.
_MAX_INLINE_ENTRIES = 2000

_REASONS = {
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: generation_pb2.FINISH_REASON_ABORT,
    FinishReason.ERROR: generation_pb2.FINISH_REASON_ERROR,
}


def accepted_response(accepted: engine_door.Accepted) -> GenerateResponse:
    """Return the first message of a stream."""
    return GenerateResponse(
        accepted=Accepted(
            request_id=accepted.request_id,
            prompt_tokens=accepted.num_prompt_tokens,
            seed=accepted.seed,
        )
    )


class Echo(NamedTuple):
    """The prompt, which the output of a sequence begins with."""

    prompt: tuple[int, ...]

    logprobs: Sequence[PositionLogprobs]
    """One entry per id, where asked for."""


class Gained(NamedTuple):
    """What a sequence adds to a message."""

    ids: tuple[int, ...]
    text: str
    logprobs: Sequence[PositionLogprobs]


class SequenceWriter:
    """Writes what one sequence adds to the messages, and finds where a stop string ends it."""

    __slots__ = (
        "_cumulative_logprob",
        "_held",
        "_index",
        "_num_candidates",
        "_omit_text",
        "_output",
        "_piece",
        "echo",
        "finish_reason",
        "num_tokens",
        "stop",
    )

    def __init__(
        self,
        index: int,
        output: OutputText | None,
        *,
        omit_text: bool,
        num_candidates: int | None = None,
        piece: Piece = lambda _: b"",
    ) -> None:
        """Begin a sequence. No `output`: neither text nor stop strings are wanted.

        No `num_candidates`: no log-probabilities are.
        """
        self._index = index
        self._output = output
        self._omit_text = omit_text
        self._num_candidates = num_candidates
        self._piece = piece
        self._held: Gained | None = None
        self._cumulative_logprob = 0.0
        self.echo: Echo | None = None
        """What still goes in front of the first tokens."""
        self.num_tokens = 0
        """Output tokens in the messages so far; the prompt's are none of them."""
        self.stop: StopMatch | None = None
        """The stop string that was completed."""
        self.finish_reason: FinishReason | None = None
        """How the sequence ended, once its last message is written."""

    def write(self, gain: Gain, response: GenerateResponse) -> bool:
        """Add a gain to a message.

        False: a stop string was completed. What was gained up to it is held until the stream,
        which must be told, gives the sequence's end.
        """
        gained = self._held or self._gained(gain)
        if self.stop is not None and gain.finish is None:
            self._held = gained
            return False
        if gained.ids or gained.text:
            response.deltas.add(
                sequence_index=self._index,
                token_ids=gained.ids,
                text="" if self._omit_text else gained.text,
                logprobs=gained.logprobs,
                step_id=gain.step_id,
            )
        if gain.finish is not None:
            self._end(response, gain.finish)
        return True

    def _gained(self, gain: Gain) -> Gained:
        """Return the ids and the text that the output gained, up to a stop string."""
        ids, text, finish = gain.token_ids, "", gain.finish
        echo, self.echo = (self.echo, None) if ids else (None, self.echo)
        if echo is not None and self._output is not None:
            text = self._output.begin_with(echo.prompt)
        if self._output is not None:
            by_token = finish is not None and finish.reason is FinishReason.STOP
            more, self.stop = self._output.push(ids, ends_with_stop_token=by_token)
            text += more
            if self.stop is not None:
                ids = ids[: self.stop.num_tokens - self.num_tokens]
            elif finish is not None:
                text += self._output.finish()
        self.num_tokens += len(ids)
        logprobs: list[PositionLogprobs] = []
        if self._num_candidates is not None:
            for id_, told in zip(ids, gain.told, strict=False):
                self._cumulative_logprob += told.logprob
                logprobs.append(position_logprobs(id_, told, self._num_candidates, self._piece))
        if echo is not None:
            return Gained((*echo.prompt, *ids), text, [*echo.logprobs, *logprobs])
        return Gained(ids, text, logprobs)

    def _end(self, response: GenerateResponse, finish: Finish) -> None:
        """Add how the sequence ended."""
        finished = response.finished.add(
            sequence_index=self._index,
            error=finish.error,
            cumulative_logprob=finish.cumulative_logprob
            if self._num_candidates is None
            else self._cumulative_logprob,
            score=finish.score,
        )
        if self.stop is not None:
            self.finish_reason = FinishReason.STOP
            finished.stop_string = self.stop.stop
        else:
            self.finish_reason = finish.reason
            if finish.stop_token_id is not None:
                finished.stop_token_id = finish.stop_token_id
        finished.reason = _REASONS[self.finish_reason]


class ResponseWriter:
    """Writes the messages of a stream, and ends sequences where a stop string is complete."""

    __slots__ = ("_piece", "_prompt", "_prompt_logprobs", "_request", "_stream", "sequences")

    def __init__(
        self,
        request: GenerateRequest,
        tokenizer: Tokenizer,
        stream: TokenStream,
        num_outputs: int,
        prompt: Sequence[int],
    ) -> None:
        """Begin the answer to a request with so many sequences behind its prompt."""

        def output() -> OutputText | None:
            if request.output.omit_text and not request.stopping.stop:
                return None
            return OutputText(
                tokenizer,
                stops=request.stopping.stop,
                include_stop=request.stopping.include_stop_string,
                min_tokens=request.stopping.min_tokens,
                skip_special_tokens=not request.output.keep_special_tokens,
            )

        self._request = request
        self._stream = stream
        self._prompt = tuple(prompt)
        self._piece = tokenizer.piece
        self._prompt_logprobs: list[PositionLogprobs] = []
        has_logprobs = request.output.HasField("logprobs")
        self.sequences = [
            SequenceWriter(
                index,
                output(),
                omit_text=request.output.omit_text,
                num_candidates=request.output.logprobs if has_logprobs else None,
                piece=tokenizer.piece,
            )
            for index in range(num_outputs)
        ]
        """By sequence index."""
        if request.output.echo:
            self._set_echo([])

    async def learn_prompt(self, table: PromptTable) -> None:
        """Take what is told of the prompt; before the batch that brings it is written.

        A long one takes a thread, so that other streams go on meanwhile.
        """
        if table.candidate_ids.size + len(self._prompt) > _MAX_INLINE_ENTRIES:
            await asyncio.to_thread(self._learn_prompt, table)
        else:
            self._learn_prompt(table)

    def _learn_prompt(self, table: PromptTable) -> None:
        output = self._request.output
        if output.HasField("prompt_logprobs"):
            self._prompt_logprobs = prompt_logprobs(
                self._prompt, table, output.prompt_logprobs, self._piece
            )
        if output.echo and output.HasField("logprobs"):
            self._set_echo(prompt_logprobs(self._prompt, table, output.logprobs, self._piece))

    def _set_echo(self, logprobs: Sequence[PositionLogprobs]) -> None:
        for sequence in self.sequences:
            sequence.echo = Echo(self._prompt, logprobs)

    def write(self, batch: TokenBatch) -> GenerateResponse | None:
        """Return the message for a batch.

        None: all it gained is held. The stream was told of complete stop strings, and its
        next batch, which comes at once, makes the message.

        Cost: 4 us for one token, of which 2 us are the message.
        """
        response = GenerateResponse()
        for gain in batch.gains:
            sequence = self.sequences[gain.sequence_index]
            if not sequence.write(gain, response):
                self._stream.finish(gain.sequence_index, sequence.num_tokens)
        if batch.account is not None:
            num_tokens = sum(sequence.num_tokens for sequence in self.sequences)
            response.summary.CopyFrom(_summary(batch.account, num_tokens))
            response.summary.prompt_logprobs.extend(self._prompt_logprobs)
            # The message has copies, and may wait for its reader for long.
            self._prompt_logprobs.clear()
        elif not response.deltas and not response.finished:
            return None
        return response


def _summary(account: Account, num_tokens: int) -> Summary:
    return Summary(
        usage=Usage(
            prompt_tokens=account.num_prompt_tokens,
            completion_tokens=num_tokens,
            cached_tokens=account.num_cached_tokens,
            recomputed_tokens=account.num_recomputed_tokens,
            draft_tokens=account.num_draft_tokens,
            accepted_draft_tokens=account.num_accepted_draft_tokens,
        ),
        timing=Timing(
            queue_s=_since(account.arrival_ns, account.first_scheduled_ns),
            ttft_s=_since(account.arrival_ns, account.first_token_ns),
            total_s=_since(account.arrival_ns, account.finished_ns),
            preemptions=account.num_preemptions,
        ),
    )


def _since(begin_ns: int, end_ns: int | None) -> float:
    """Return an interval in seconds; 0 for what did not happen."""
    return 0.0 if end_ns is None else 1e-9 * (end_ns - begin_ns)
