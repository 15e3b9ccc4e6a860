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
from scheduler_svc.service.engine_door import Account, Finish, TokenBatch, TokenStream
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


class ResponseWriter:
    """Writes the messages of one sequence, and ends it where a stop string is complete."""

    __slots__ = (
        "_held",
        "_omit_text",
        "_output",
        "_stop",
        "_stream",
        "finish_reason",
        "num_tokens",
    )

    def __init__(self, request: GenerateRequest, tokenizer: Tokenizer, stream: TokenStream) -> None:
        self._stream = stream
        self._omit_text = request.output.omit_text
        self._output: OutputText | None = None
        if request.stopping.stop or not self._omit_text:
            self._output = OutputText(
                tokenizer,
                stops=request.stopping.stop,
                include_stop=request.stopping.include_stop_string,
                skip_special_tokens=not request.output.keep_special_tokens,
            )
        self.num_tokens = 0
        """Output tokens in the messages so far."""
        self.finish_reason: FinishReason | None = None
        """How the output ended, once the last message is written."""
        self._stop: StopMatch | None = None
        self._held: GenerateResponse | None = None

    def write(self, batch: TokenBatch) -> GenerateResponse | None:
        """Return the message for a batch.

        None: a stop string was completed. The stream is told, and its last batch, which
        comes at once, makes the message.

        Cost: 4 us for one token, of which 2 us are the message.
        """
        response = self._held or self._gain(batch)
        if batch.finish is not None:
            self._end(response, batch.finish)
        elif self._stop is not None:
            self._held = response
            self._stream.finish(self.num_tokens)
            return None
        return response

    def _gain(self, batch: TokenBatch) -> GenerateResponse:
        """Return a message with what the output gained, up to a stop string."""
        ids, text, finish = batch.token_ids, "", batch.finish
        if self._output is not None:
            by_token = finish is not None and finish.reason is FinishReason.STOP
            text, self._stop = self._output.push(ids, ends_with_stop_token=by_token)
            if self._stop is not None:
                ids = ids[: self._stop.num_tokens - self.num_tokens]
            elif finish is not None:
                text += self._output.finish()
        self.num_tokens += len(ids)
        response = GenerateResponse()
        if ids or text:
            shown = "" if self._omit_text else text
            response.deltas.add(token_ids=ids, text=shown, step_id=batch.step_id)
        return response

    def _end(self, response: GenerateResponse, finish: Finish) -> None:
        """Add how the output ended, and its account."""
        finished = response.finished.add(error=finish.error)
        if self._stop is not None:
            self.finish_reason = FinishReason.STOP
            finished.stop_string = self._stop.stop
        else:
            self.finish_reason = finish.reason
            if finish.stop_token_id is not None:
                finished.stop_token_id = finish.stop_token_id
        finished.reason = _REASONS[self.finish_reason]
        response.summary.CopyFrom(_summary(finish.account, self.num_tokens))


def _summary(account: Account, num_tokens: int) -> Summary:
    return Summary(
        usage=Usage(
            prompt_tokens=account.num_prompt_tokens,
            completion_tokens=num_tokens,
            cached_tokens=account.num_cached_tokens,
            recomputed_tokens=account.num_recomputed_tokens,
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
