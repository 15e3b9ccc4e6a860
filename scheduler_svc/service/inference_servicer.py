"""The RPCs of pagemill.v1.Inference. They translate; the engine decides."""

from collections.abc import AsyncGenerator
from time import monotonic_ns

from pagemill.v1.inference_pb2 import (
    DetokenizeRequest,
    DetokenizeResponse,
    EmbedRequest,
    EmbedResponse,
    GenerateRequest,
    GenerateResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from scheduler_svc.core.errors import DeadlineError, InvalidRequestError
from scheduler_svc.service.call_watch import CallWatch
from scheduler_svc.service.embedding import Embedder
from scheduler_svc.service.engine_door import EngineDoor
from scheduler_svc.service.field_bounds import check_token_ids
from scheduler_svc.service.front_end import FrontEnd
from scheduler_svc.service.request_reading import read_request
from scheduler_svc.service.response_writing import ResponseWriter, accepted_response
from scheduler_svc.service.rpc_handlers import Context

_LEAST_TIME_S = 0.002
"""gRPC rounds deadlines up, to milliseconds and on both sides: with less left, time may be up."""


class InferenceServicer:
    """Generation and text, for one model. Methods raise RequestError."""

    def __init__(self, door: EngineDoor, front: FrontEnd) -> None:
        self._door = door
        self._front = front
        self._embedder = Embedder(door, front)

    async def Generate(
        self, request: GenerateRequest, context: Context
    ) -> AsyncGenerator[GenerateResponse, None]:
        """Stream one request's output.

        A cancelled or expired call ends in CancelledError, or in GeneratorExit at a `yield`;
        leaving the `async with` then frees what the request holds. There is no other
        clean-up path.
        """
        front, arrival_ns = self._front, monotonic_ns()
        deadline_ns = _deadline_ns(context, arrival_ns)
        trace = None
        if front.tracer is not None:
            trace = front.tracer.begin(arrival_ns, context.invocation_metadata() or ())
        with CallWatch(
            front.metrics, trace, arrival_ns=arrival_ns, deadline_ns=deadline_ns
        ) as watch:
            if deadline_ns is not None and deadline_ns <= arrival_ns:
                raise DeadlineError("the deadline had passed when the request arrived")
            submission = await read_request(
                request,
                front,
                arrival_ns=arrival_ns,
                deadline_ns=deadline_ns,
                traceparent=trace.traceparent if trace else "",
            )
            async with self._door.open(submission) as stream:
                operation = "chat" if request.HasField("chat") else "text_completion"
                watch.accepted(stream, submission, front.model_name(request.model), operation)
                yield accepted_response(stream.accepted)

                writer = ResponseWriter(
                    request,
                    front.tokenizer,
                    stream,
                    submission.num_outputs,
                    submission.token_ids,
                )
                async for batch in stream:
                    if batch.prompt_table is not None:
                        await writer.learn_prompt(batch.prompt_table)
                    response = writer.write(batch)
                    if response is None:
                        continue
                    watch.sends(batch, writer.sequences)
                    yield response
                    if request.output.min_interval_s and batch.account is None:
                        await stream.rest(request.output.min_interval_s)

    async def Embed(self, request: EmbedRequest, context: Context) -> EmbedResponse:
        """Return pooled hidden states. A call that ends before frees what its inputs hold."""
        arrival_ns = monotonic_ns()
        deadline_ns = _deadline_ns(context, arrival_ns)
        return await self._embedder.embed(request, arrival_ns=arrival_ns, deadline_ns=deadline_ns)

    async def Tokenize(self, request: TokenizeRequest, _context: Context) -> TokenizeResponse:
        """Turn a text or a conversation into token ids."""
        self._front.model_name(request.model)
        prompts = self._front.prompts
        kind = request.WhichOneof("input")
        if kind == "text":
            ids = await prompts.encode_text(
                request.text, add_special_tokens=not request.omit_special_tokens
            )
        elif kind == "chat":
            ids = await prompts.encode_chat(request.chat)
        else:
            raise InvalidRequestError("input", "input is missing, must be one of text, chat")
        return TokenizeResponse(token_ids=ids)

    async def Detokenize(self, request: DetokenizeRequest, _context: Context) -> DetokenizeResponse:
        """Turn token ids into text."""
        front = self._front
        front.model_name(request.model)
        if len(request.token_ids) > front.limits.max_model_len:
            raise InvalidRequestError(
                "token_ids",
                f"token_ids has {len(request.token_ids)} ids, must have at most "
                f"{front.limits.max_model_len}, the most a request may have",
            )
        check_token_ids("token_ids", request.token_ids, front.facts.vocab_size)
        text = front.tokenizer.decode(
            request.token_ids, skip_special_tokens=not request.keep_special_tokens
        )
        return DetokenizeResponse(text=text)


def _deadline_ns(context: Context, now_ns: int) -> int | None:
    """Return when the call's time is up, on the monotonic clock, or None for a call without end."""
    # The stubs know no call without a deadline; there grpc returns None.
    remaining_s: float | None = context.time_remaining()
    if remaining_s is None:
        return None
    return now_ns if remaining_s < _LEAST_TIME_S else now_ns + int(remaining_s * 1e9)
