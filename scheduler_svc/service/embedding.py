"""Pooled hidden states: the inputs of an EmbedRequest as requests without output, side by side."""

import asyncio
import uuid
from array import array
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack

import numpy as np

from pagemill.v1 import inference_pb2
from pagemill.v1.inference_pb2 import (
    EmbedRequest,
    EmbedResponse,
    GenerateResponse,
    PooledVector,
    Usage,
)
from scheduler_svc.core.errors import (
    AbortedError,
    InvalidRequestError,
    NotComputedError,
    QueueFullError,
    RequestError,
)
from scheduler_svc.core.reports import Pooling, Reports
from scheduler_svc.core.request import FinishReason, Sampling
from scheduler_svc.core.told import Vector
from scheduler_svc.service.call_watch import CallWatch
from scheduler_svc.service.engine_door import Account, EngineDoor, Finish, Submission, TokenStream
from scheduler_svc.service.field_bounds import check_request_id, check_size
from scheduler_svc.service.front_end import FrontEnd
from scheduler_svc.service.response_writing import SequenceWriter

MAX_INPUTS = 1024
"""Of one call. A vector of 8,192 numbers has 32 KB."""

_MAX_AT_ONCE = 32
"""Inputs of one call in the engine: a long call leaves room in the queue for others."""

_POOLING: Mapping[int, Pooling] = {
    inference_pb2.POOLING_UNSPECIFIED: Pooling.LAST,
    inference_pb2.POOLING_LAST: Pooling.LAST,
    inference_pb2.POOLING_MEAN: Pooling.MEAN,
}


class _Inputs:
    """The inputs of one call that are in the engine. A full queue waits for one of them to end."""

    def __init__(self, door: EngineDoor) -> None:
        self._door = door
        self._num_open = 0
        self._ended = asyncio.Event()

    async def open(self, stack: AsyncExitStack, submission: Submission) -> TokenStream:
        """Submit an input until the block of `stack` ends, once the queue has room.

        Queues may be shorter than a call, whose own inputs fill them. Each of these ends, at the
        latest by the call's deadline.

        Raises: RequestError kinds; QueueFullError only if others alone fill the queue.
        """
        while True:
            ended = self._ended
            try:
                stream = await stack.enter_async_context(self._door.open(submission))
            except QueueFullError:
                if not self._num_open:
                    raise
                await ended.wait()
                continue
            self._num_open += 1
            stack.callback(self._close)
            return stream

    def _close(self) -> None:
        self._num_open -= 1
        self._ended.set()
        self._ended = asyncio.Event()


class Embedder:
    """Answers Embed calls for one model."""

    def __init__(self, door: EngineDoor, front: FrontEnd) -> None:
        self._door = door
        self._front = front

    async def embed(
        self, request: EmbedRequest, *, arrival_ns: int, deadline_ns: int | None
    ) -> EmbedResponse:
        """Return one vector for each input, in order. If one fails, the others are ended.

        Raises: RequestError; for a field that is out of its bound before anything is queued.
        """
        submissions = await self._read(request, arrival_ns, deadline_ns)
        room, inputs = asyncio.Semaphore(_MAX_AT_ONCE), _Inputs(self._door)
        name = self._front.model_name(request.model)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._pooled(submission, name, room, inputs))
                    for submission in submissions
                ]
        except ExceptionGroup as errors:
            raise _first(errors) from None
        outcomes = [task.result() for task in tasks]
        vectors = [vector for vector, _ in outcomes]
        if request.normalize:
            vectors = [normalized(vector) for vector in vectors]
        accounts = [account for _, account in outcomes]
        return EmbedResponse(
            vectors=[PooledVector(values=vector.astype("<f4").tobytes()) for vector in vectors],
            usage=Usage(
                prompt_tokens=sum(each.num_prompt_tokens for each in accounts),
                cached_tokens=sum(each.num_cached_tokens for each in accounts),
                recomputed_tokens=sum(each.num_recomputed_tokens for each in accounts),
            ),
        )

    async def _read(
        self, request: EmbedRequest, arrival_ns: int, deadline_ns: int | None
    ) -> list[Submission]:
        """Return the inputs as requests. Raises: UnknownModelError, InvalidRequestError."""
        self._front.model_name(request.model)
        check_request_id(request.request_id)
        if request.pooling not in _POOLING:
            raise InvalidRequestError(
                "pooling", f"pooling is {request.pooling}, must be one of {sorted(_POOLING)}"
            )
        pooling = _POOLING[request.pooling]
        inputs = await self._token_ids(request)
        request_id = request.request_id or uuid.uuid4().hex
        return [
            Submission(
                request_id=request_id if len(inputs) == 1 else f"{request_id}#{number}",
                tenant="",
                token_ids=token_ids,
                sampling=Sampling(temperature=0.0),
                max_output_tokens=1,
                min_output_tokens=0,
                eos_token_ids=frozenset(),
                stop_token_ids=frozenset(),
                salt=b"",
                # A mean needs each token's state; the last one's is always computed.
                read_cache=pooling is Pooling.LAST,
                priority=0,
                deadline_ns=deadline_ns,
                arrival_ns=arrival_ns,
                traceparent="",
                reports=Reports(pooling=pooling),
                call_id=request_id,
            )
            for number, token_ids in enumerate(inputs)
        ]

    async def _token_ids(self, request: EmbedRequest) -> "list[array[int]]":
        prompts = self._front.prompts
        field = request.WhichOneof("input")
        if field is None:
            raise InvalidRequestError("input", "input is missing, must be one of texts, tokens")
        inputs: Sequence[object] = (
            request.texts.texts if field == "texts" else request.tokens.inputs
        )
        if not inputs:
            raise InvalidRequestError(field, f"{field} is empty, must have at least 1 input")
        check_size(field, inputs, MAX_INPUTS, "inputs")
        if field == "texts":
            return [
                prompts.checked(f"texts[{number}]", await prompts.encode_text(text))
                for number, text in enumerate(request.texts.texts)
            ]
        return [
            prompts.checked(f"tokens[{number}]", tokens.ids)
            for number, tokens in enumerate(request.tokens.inputs)
        ]

    async def _pooled(
        self, submission: Submission, model: str, room: asyncio.Semaphore, inputs: _Inputs
    ) -> tuple[Vector, Account]:
        """Run one input to its end.

        Raises: RequestError kinds; NotComputedError or AbortedError if it ended without a vector.
        """
        async with room:
            with CallWatch(
                self._front.metrics,
                None,
                arrival_ns=submission.arrival_ns,
                deadline_ns=submission.deadline_ns,
            ) as watch:
                async with AsyncExitStack() as stack:
                    stream = await inputs.open(stack, submission)
                    watch.accepted(stream, submission, model, "embeddings")
                    # It writes nothing here: it knows how the sequence ended.
                    ends, finish = SequenceWriter(0, None, omit_text=True), None
                    async for batch in stream:
                        for gain in batch.gains:
                            ends.write(gain, GenerateResponse())
                            finish = gain.finish or finish
                        watch.sends(batch, [ends])
                    return _vector(finish), stream.account()


def _vector(finish: Finish | None) -> Vector:
    if finish is not None and finish.vector is not None:
        return finish.vector
    if finish is not None and finish.reason is FinishReason.ABORT:
        raise AbortedError("the request was aborted")
    raise NotComputedError(
        f"an input could not be computed: {finish.error if finish else 'its stream ended'}"
    )


def normalized(vector: Vector) -> Vector:
    """Return the vector of length 1 with the same direction, in float32; zeros stay zeros."""
    largest = np.abs(vector).max()
    if largest == 0:
        return vector
    # Squares of what is left neither overflow nor vanish.
    scaled: Vector = vector / largest
    scaled /= np.linalg.norm(scaled)
    return scaled


def _first(errors: ExceptionGroup[Exception]) -> RequestError:
    """Return the first refusal of a group. What is none, is ours, and goes on as it is."""
    refused, others = errors.split(RequestError)
    if refused is None or others is not None:
        raise errors
    error: BaseException = refused
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if not isinstance(error, RequestError):
        raise errors
    return error
