"""The span of a request: begun when it arrives, its parts written when it ends."""

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from operator import itemgetter
from time import monotonic_ns, time_ns

import grpc
from opentelemetry.context import Context
from opentelemetry.trace import (
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    Tracer,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from scheduler_svc.core.request import FinishReason, RequestKey
from scheduler_svc.service import trace_names as names
from scheduler_svc.service.engine_door import Account, Submission

_MAX_STEP_LINKS = 16
_PROVIDER = "pagemill"


class RequestTracer:
    """Begins the spans of requests, and knows those whose requests are live."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._propagator = TraceContextTextMapPropagator()
        self.live: dict[RequestKey, RequestTrace] = {}
        """Traced requests, from acceptance to the end."""

    def begin(
        self, arrival_ns: int, metadata: Iterable[tuple[str, str | bytes]]
    ) -> "RequestTrace | None":
        """Begin a request's span, under the caller's if `traceparent` names one.

        None: the request is not sampled. What cannot be read as a trace context is ignored.

        Cost: 15 us if not sampled, 30 us if so; 130 us with the parts, written at the end.
        """
        carrier = {
            key: value
            for key, value in metadata
            if key in {"traceparent", "tracestate"} and isinstance(value, str)
        }
        # Clocks are compared once a request, so that none ends before it began if the wall
        # clock is set.
        to_wall_ns = time_ns() - monotonic_ns()
        span = self._tracer.start_span(
            names.GENERATE_SPAN,
            self._propagator.extract(carrier, Context()),
            SpanKind.SERVER,
            {names.RPC_SYSTEM: "grpc", names.RPC_METHOD: names.GENERATE_SPAN},
            start_time=arrival_ns + to_wall_ns,
        )
        return RequestTrace(self, self._tracer, span, to_wall_ns) if span.is_recording() else None


class RequestTrace:
    """One sampled request."""

    __slots__ = (
        "_key",
        "_span",
        "_step_contexts",
        "_to_wall_ns",
        "_token_times_ns",
        "_tracer",
        "_traces",
    )

    def __init__(self, traces: RequestTracer, tracer: Tracer, span: Span, to_wall_ns: int) -> None:
        self._traces = traces
        self._tracer = tracer
        self._span = span
        self._to_wall_ns = to_wall_ns
        self._token_times_ns = array("q")
        self._step_contexts: list[SpanContext] = []
        self._key = RequestKey("", "")

    @property
    def context(self) -> SpanContext:
        """What a link to this request points at."""
        return self._span.get_span_context()

    @property
    def traceparent(self) -> str:
        """The span's W3C trace context, for those further down."""
        context = self.context
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def accepted(self, submission: Submission, model: str, operation: str) -> None:
        """Note what was asked for. The request is live from now on."""
        sampling = submission.sampling
        self._span.set_attributes(
            {
                names.OPERATION: operation,
                names.PROVIDER: _PROVIDER,
                names.REQUEST_MODEL: model,
                names.RESPONSE_ID: submission.request_id,
                names.REQUEST_TEMPERATURE: sampling.temperature,
                names.REQUEST_TOP_P: sampling.top_p,
                names.REQUEST_TOP_K: sampling.top_k,
                # An attribute has 63 bits and a sign, a seed 64 bits.
                names.REQUEST_SEED: str(sampling.seed),
                names.INPUT_TOKENS: len(submission.token_ids),
            }
        )
        if submission.num_outputs > 1:
            self._span.set_attribute(names.REQUEST_CHOICES, submission.num_outputs)
        if submission.beam is not None:
            self._span.set_attribute(names.REQUEST_BEAM_WIDTH, submission.beam.width)
        if submission.max_output_tokens is not None:
            self._span.set_attribute(names.REQUEST_MAX_TOKENS, submission.max_output_tokens)
        if submission.tenant:
            self._span.set_attribute(names.TENANT, submission.tenant)
        self._key = RequestKey(submission.tenant, submission.request_id)
        self._traces.live[self._key] = self

    def tokens(self, now_ns: int) -> None:
        """Note that tokens were handed out."""
        self._token_times_ns.append(now_ns)

    def step(self, context: SpanContext) -> None:
        """Note a traced step that sampled for this request. The first 16 are linked."""
        if len(self._step_contexts) < _MAX_STEP_LINKS:
            self._step_contexts.append(context)

    def ended(self, account: Account, reasons: Sequence[FinishReason], ended_ns: int) -> None:
        """Write the parts of a request that was accepted; each sequence has a reason."""
        del self._traces.live[self._key]
        end_ns = account.finished_ns or ended_ns
        span = self._span
        said: dict[str, AttributeValue | None] = {
            names.FINISH_REASONS: [reason.value for reason in reasons],
            names.OUTPUT_TOKENS: account.num_output_tokens,
            names.CACHED_TOKENS: account.num_cached_tokens,
            names.MISS_REASON: account.miss_reason.value if account.miss_reason else None,
            names.RECOMPUTED_TOKENS: account.num_recomputed_tokens,
            names.PREEMPTIONS: account.num_preemptions,
            names.FIRST_STEP_ID: account.first_step_id,
            names.LAST_STEP_ID: account.last_step_id,
            names.TIME_IN_QUEUE: _seconds(account.arrival_ns, account.first_scheduled_ns),
            names.TIME_TO_FIRST_TOKEN: _seconds(account.arrival_ns, account.first_token_ns),
            names.END_TO_END: _seconds(account.arrival_ns, end_ns),
        }
        span.set_attributes({name: value for name, value in said.items() if value is not None})
        for preempted_ns in account.preemption_times_ns:
            span.add_event(names.PREEMPTED_SPAN, timestamp=preempted_ns + self._to_wall_ns)
        for context in self._step_contexts:
            span.add_link(context)
        parent = set_span_in_context(span, Context())
        for name, begin_ns, part_end_ns in request_parts(account, self._token_times_ns, end_ns):
            part = self._tracer.start_span(name, parent, start_time=begin_ns + self._to_wall_ns)
            part.end(part_end_ns + self._to_wall_ns)

    def close(self, code: grpc.StatusCode, error: str, now_ns: int) -> None:
        """End the span with the status of the call. `error` empty: the call went well."""
        self._span.set_attribute(names.RPC_STATUS, code.name)
        if error:
            # A sequence that could not be computed ends a call that went well.
            kind = FinishReason.ERROR.value if code is grpc.StatusCode.OK else code.name
            self._span.set_attribute(names.ERROR_TYPE, kind)
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end(now_ns + self._to_wall_ns)


def request_parts(
    account: Account, token_times_ns: "array[int]", end_ns: int
) -> Iterator[tuple[str, int, int]]:
    """Yield name, begin and end of each part of a request's time, without gap or overlap.

    A preempted request runs again, at the latest, when its next token comes, of whatever
    sequence; that is as much as is known here.
    """
    begins = [(account.arrival_ns, names.QUEUE_SPAN)]
    if account.first_scheduled_ns is not None:
        begins.append((account.first_scheduled_ns, names.PREFILL_SPAN))
    if account.first_token_ns is not None:
        begins.append((account.first_token_ns, names.DECODE_SPAN))
    for preempted_ns in account.preemption_times_ns:
        begins.append((preempted_ns, names.PREEMPTED_SPAN))
        following = bisect_right(token_times_ns, preempted_ns)
        if following < len(token_times_ns):
            begins.append((token_times_ns[following], names.DECODE_SPAN))
    # Of parts that begin together the last lasts; a part may follow its like, and then goes on.
    begins.sort(key=itemgetter(0))
    in_order = [begin for begin in dict(begins).items() if begin[0] < end_ns]
    changes = [begin for before, begin in pairwise([(0, ""), *in_order]) if begin[1] != before[1]]
    for (begin_ns, name), (next_ns, _) in pairwise([*changes, (end_ns, "")]):
        yield name, begin_ns, next_ns


def _seconds(begin_ns: int, end_ns: int | None) -> float | None:
    return None if end_ns is None else 1e-9 * (end_ns - begin_ns)
