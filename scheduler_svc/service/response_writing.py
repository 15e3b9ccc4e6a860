"""Tokens of a stream into the messages that its client reads."""

from pagemill.v1 import generation_pb2
from pagemill.v1.inference_pb2 import (
    Accepted,
    GenerateRequest,
    GenerateResponse,
    Summary,
    Timing,
    Usage,
)
from scheduler_svc.core.request import FinishReason
from scheduler_svc.service import engine_door
from scheduler_svc.service.engine_door import Account, Finish, Gain, TokenBatch, TokenStream
from scheduler_svc.service.text.output_text import OutputText
from scheduler_svc.service.text.stop_strings import StopMatch
from scheduler_svc.service.text.tokenizer import Tokenizer

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


class SequenceWriter:
    """Writes what one sequence adds to the messages, and finds where a stop string ends it."""

    __slots__ = ("_held", "_index", "_omit_text", "_output", "finish_reason", "num_tokens", "stop")

    def __init__(self, index: int, output: OutputText | None, *, omit_text: bool) -> None:
        """Begin a sequence. No `output`: neither text nor stop strings are wanted."""
        self._index = index
        self._output = output
        self._omit_text = omit_text
        self._held: tuple[tuple[int, ...], str] | None = None
        self.num_tokens = 0
        """Output tokens in the messages so far."""
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
        ids, text = gained
        if ids or text:
            response.deltas.add(
                sequence_index=self._index,
                token_ids=ids,
                text="" if self._omit_text else text,
                step_id=gain.step_id,
            )
        if gain.finish is not None:
            self._end(response, gain.finish)
        return True

    def _gained(self, gain: Gain) -> tuple[tuple[int, ...], str]:
        """Return the ids and the text that the output gained, up to a stop string."""
        ids, text, finish = gain.token_ids, "", gain.finish
        if self._output is not None:
            by_token = finish is not None and finish.reason is FinishReason.STOP
            text, self.stop = self._output.push(ids, ends_with_stop_token=by_token)
            if self.stop is not None:
                ids = ids[: self.stop.num_tokens - self.num_tokens]
            elif finish is not None:
                text += self._output.finish()
        self.num_tokens += len(ids)
        return ids, text

    def _end(self, response: GenerateResponse, finish: Finish) -> None:
        """Add how the sequence ended."""
        finished = response.finished.add(
            sequence_index=self._index,
            error=finish.error,
            cumulative_logprob=finish.cumulative_logprob,
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

    __slots__ = ("_stream", "sequences")

    def __init__(
        self, request: GenerateRequest, tokenizer: Tokenizer, stream: TokenStream, num_outputs: int
    ) -> None:
        """Begin the answer to a request with so many sequences."""

        def output() -> OutputText | None:
            if request.output.omit_text and not request.stopping.stop:
                return None
            return OutputText(
                tokenizer,
                stops=request.stopping.stop,
                include_stop=request.stopping.include_stop_string,
                skip_special_tokens=not request.output.keep_special_tokens,
            )

        self._stream = stream
        self.sequences = [
            SequenceWriter(index, output(), omit_text=request.output.omit_text)
            for index in range(num_outputs)
        ]
        """By sequence index."""

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
