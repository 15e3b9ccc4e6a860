"""What one Generate call shows to metrics and traces, however it ends."""

from asyncio import CancelledError
from collections.abc import Sequence
from time import monotonic_ns
from types import TracebackType
from typing import Self

import grpc

from scheduler_svc.core.errors import RequestError
from scheduler_svc.core.request import FinishReason
from scheduler_svc.service.engine_door import Submission, TokenBatch, TokenStream
from scheduler_svc.service.metrics import RequestMetrics
from scheduler_svc.service.request_trace import RequestTrace
from scheduler_svc.service.response_writing import SequenceWriter
from scheduler_svc.service.status import refusal

# How a sequence counts whose stream ended without its finish: as aborted. Others are errors.
_ABORTS = {
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}


class CallWatch:
    """Notes what happens to a call. Leaving the block is its end; no exception is held back."""

    __slots__ = (
        "_arrival_ns",
        "_deadline_ns",
        "_finish_error",
        "_last_tokens_ns",
        "_metrics",
        "_num_tokens",
        "_reasons",
        "_stream",
        "_trace",
    )

    def __init__(
        self,
        metrics: RequestMetrics,
        trace: RequestTrace | None,
        *,
        arrival_ns: int,
        deadline_ns: int | None,
    ) -> None:
        self._metrics = metrics
        self._trace = trace
        self._arrival_ns = arrival_ns
        self._deadline_ns = deadline_ns
        # By sequence index.
        self._num_tokens: list[int] = []
        self._last_tokens_ns: list[int] = []
        self._reasons: list[FinishReason | None] = []
        self._stream: TokenStream | None = None
        self._finish_error = ""

    def accepted(
        self, stream: TokenStream, submission: Submission, model: str, operation: str
    ) -> None:
        """Note that the engine took the request."""
        self._stream = stream
        self._num_tokens = [0] * submission.num_outputs
        self._last_tokens_ns = [0] * submission.num_outputs
        self._reasons = [None] * submission.num_outputs
        if self._trace is not None:
            self._trace.accepted(submission, model, operation)

    def sends(self, batch: TokenBatch, sequences: Sequence[SequenceWriter]) -> None:
        """Note the message of a batch, which is about to go: its tokens, and what ended."""
        now_ns = monotonic_ns()
        gained = False
        for gain in batch.gains:
            index, sequence = gain.sequence_index, sequences[gain.sequence_index]
            gained |= self._delivers(index, sequence.num_tokens, now_ns)
            if gain.finish is not None:
                self._reasons[index] = sequence.finish_reason
                self._finish_error = self._finish_error or gain.finish.error
        if gained and self._trace is not None:
            self._trace.tokens(now_ns)

    def _delivers(self, index: int, num_tokens: int, now_ns: int) -> bool:
        """Note that a sequence's first `num_tokens` tokens are with the client, or under way."""
        count = num_tokens - self._num_tokens[index]
        if not count:
            return False
        if self._num_tokens[index]:
            self._metrics.later_tokens(count, 1e-9 * (now_ns - self._last_tokens_ns[index]))
        elif not any(self._num_tokens):
            self._metrics.first_token(1e-9 * (now_ns - self._arrival_ns))
        self._num_tokens[index], self._last_tokens_ns[index] = num_tokens, now_ns
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        now_ns = monotonic_ns()
        code, sentence = self._outcome(error, now_ns)
        if self._stream is None:
            self._metrics.refused(code)
        else:
            unfinished = FinishReason.ABORT if code in _ABORTS else FinishReason.ERROR
            reasons = [reason or unfinished for reason in self._reasons]
            account = self._stream.account()
            self._metrics.ended(reasons, account, now_ns)
            if self._trace is not None:
                self._trace.ended(account, reasons, now_ns)
        if self._trace is not None:
            self._trace.close(code, sentence, now_ns)

    def _outcome(self, error: BaseException | None, now_ns: int) -> tuple[grpc.StatusCode, str]:
        """Return the status of the call, and a sentence if it failed."""
        if error is None:
            return grpc.StatusCode.OK, self._finish_error
        if isinstance(error, RequestError):
            return refusal(error).code, str(error)
        if isinstance(error, CancelledError | GeneratorExit):
            if self._deadline_ns is not None and now_ns >= self._deadline_ns:
                return grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline passed"
            return grpc.StatusCode.CANCELLED, "the client cancelled the call"
        return grpc.StatusCode.UNKNOWN, type(error).__name__
