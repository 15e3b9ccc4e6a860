"""A server that plays what a test tells it, over real gRPC: what clients meet, but no engine."""

import asyncio
import struct
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from pagemill.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    control_pb2,
    control_pb2_grpc,
    generation_pb2,
    inference_pb2,
    inference_pb2_grpc,
)

Context = grpc.aio.ServicerContext[Any, Any]
Play = Callable[
    [inference_pb2.GenerateRequest, Context], AsyncIterator[inference_pb2.GenerateResponse]
]


def accepted(request_id: str = "r1", prompt_tokens: int = 3) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(
        accepted=inference_pb2.Accepted(request_id=request_id, prompt_tokens=prompt_tokens, seed=7)
    )


def delta(
    text: str, token_ids: Sequence[int], sequence_index: int = 0
) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(
        deltas=[
            inference_pb2.Delta(
                text=text, token_ids=token_ids, step_id=5, sequence_index=sequence_index
            )
        ]
    )


def sequence_ended(sequence_index: int, **fields: Any) -> inference_pb2.GenerateResponse:
    """Return a message with the end of one sequence, of which others may follow."""
    finished = inference_pb2.Finished(
        sequence_index=sequence_index, reason=generation_pb2.FINISH_REASON_STOP, **fields
    )
    return inference_pb2.GenerateResponse(finished=[finished])


def ended(completion_tokens: int = 2, cached_tokens: int = 0) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(
        finished=[inference_pb2.Finished(reason=generation_pb2.FINISH_REASON_LENGTH)],
        summary=inference_pb2.Summary(
            usage=inference_pb2.Usage(
                prompt_tokens=3, completion_tokens=completion_tokens, cached_tokens=cached_tokens
            ),
            timing=inference_pb2.Timing(queue_s=0.25, ttft_s=0.5, total_s=1.5),
        ),
    )


def says(*messages: inference_pb2.GenerateResponse) -> Play:
    """Return a play that sends these messages and ends."""

    async def play(
        request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        for message in messages:
            yield message

    return play


HELLO = says(accepted(), delta("Hel", [10]), delta("lo", [11]), ended())


async def forever(
    request: inference_pb2.GenerateRequest, context: Context
) -> AsyncIterator[inference_pb2.GenerateResponse]:
    """Accept, then send a token whenever the reader waits."""
    yield accepted()
    while True:
        yield delta("x", [1])
        await asyncio.sleep(0.001)


async def silent(
    request: inference_pb2.GenerateRequest, context: Context
) -> AsyncIterator[inference_pb2.GenerateResponse]:
    """Never say anything."""
    await asyncio.Event().wait()
    yield accepted()


def fails(
    code: grpc.StatusCode, message: str, *details: Message, after: Sequence[Any] = ()
) -> Play:
    """Return a play that sends `after` and ends with a status and its rich details."""

    async def play(
        request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        for sent in after:
            yield sent
        await context.abort_with_status(status(code, message, *details))

    return play


def status(code: grpc.StatusCode, message: str, *details: Message) -> grpc.Status:
    packed = []
    for detail in details:
        packed.append(any_pb2.Any())
        packed[-1].Pack(detail)
    rich = status_pb2.Status(code=code_pb2.Code.Value(code.name), message=message, details=packed)
    return cast("grpc.Status", rpc_status.to_status(rich))


def retry_info(seconds: float) -> error_details_pb2.RetryInfo:
    delay = duration_pb2.Duration()
    delay.FromNanoseconds(int(seconds * 1e9))
    return error_details_pb2.RetryInfo(retry_delay=delay)


@dataclass
class ScriptedServer:
    """Plays one script per Generate call, the last one again and again."""

    plays: list[Play] = field(default_factory=lambda: [HELLO])
    serving: bool = True
    requests: list[inference_pb2.GenerateRequest] = field(default_factory=list)
    aborts: list[control_pb2.AbortRequest] = field(default_factory=list)
    adapters: dict[str, str] = field(default_factory=dict)
    embeds: list[inference_pb2.EmbedRequest] = field(default_factory=list)
    pins: list[admin_pb2.PinRequest] = field(default_factory=list)
    metadata: list[dict[str, str]] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    request_came: threading.Event = field(default_factory=threading.Event)
    cancellation: threading.Event = field(default_factory=threading.Event)

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        self.requests.append(request)
        self.request_came.set()
        self.metadata.append(dict(context.invocation_metadata()))
        play = self.plays.pop(0) if len(self.plays) > 1 else self.plays[0]
        try:
            async for message in play(request, context):
                yield message
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.append(request.request_id)
            self.cancellation.set()
            raise

    async def Embed(
        self, request: inference_pb2.EmbedRequest, context: Any
    ) -> inference_pb2.EmbedResponse:
        self.embeds.append(request)
        count = len(request.texts.texts) + len(request.tokens.inputs)
        return inference_pb2.EmbedResponse(
            vectors=[
                inference_pb2.PooledVector(values=struct.pack("<2f", number, 0.5))
                for number in range(count)
            ],
            usage=inference_pb2.Usage(prompt_tokens=5, cached_tokens=2),
        )

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Any
    ) -> inference_pb2.TokenizeResponse:
        text = request.text or "".join(message.content for message in request.chat.messages)
        return inference_pb2.TokenizeResponse(token_ids=list(text.encode()))

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: Any
    ) -> inference_pb2.DetokenizeResponse:
        return inference_pb2.DetokenizeResponse(text=bytes(request.token_ids).decode())

    async def GetServerInfo(
        self, request: control_pb2.GetServerInfoRequest, context: Any
    ) -> control_pb2.GetServerInfoResponse:
        worker = control_pb2.WorkerInfo(device="cpu")
        return control_pb2.GetServerInfoResponse(
            version="0.1.0",
            model_names=["demo"],
            block_size=16,
            groups=[control_pb2.WorkerGroupInfo(ready=True, workers=[worker])],
        )

    async def GetModelInfo(
        self, request: control_pb2.GetModelInfoRequest, context: Any
    ) -> control_pb2.GetModelInfoResponse:
        if request.model not in {"", "demo"}:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no model {request.model}")
        return control_pb2.GetModelInfoResponse(model="demo", vocab_size=272, eos_token_ids=[2])

    async def GetLoad(
        self, request: control_pb2.GetLoadRequest, context: Any
    ) -> control_pb2.GetLoadResponse:
        return control_pb2.GetLoadResponse(running=1, total_blocks=8, pinned_blocks=3)

    async def Abort(
        self, request: control_pb2.AbortRequest, context: Any
    ) -> control_pb2.AbortResponse:
        self.aborts.append(request)
        return control_pb2.AbortResponse(aborted=request.request_ids)

    async def Pin(self, request: admin_pb2.PinRequest, context: Any) -> admin_pb2.PinResponse:
        self.pins.append(request)
        return admin_pb2.PinResponse(pin_id="p1", num_blocks=len(request.token_ids) // 16)

    async def LoadAdapter(
        self, request: admin_pb2.LoadAdapterRequest, context: Any
    ) -> admin_pb2.LoadAdapterResponse:
        if request.path == "nowhere":
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "path is 'nowhere'")
        self.adapters[request.name] = request.path
        return admin_pb2.LoadAdapterResponse(generation=0xABC)

    async def UnloadAdapter(
        self, request: admin_pb2.UnloadAdapterRequest, context: Any
    ) -> admin_pb2.UnloadAdapterResponse:
        if self.adapters.pop(request.name, None) is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such adapter")
        return admin_pb2.UnloadAdapterResponse()

    async def ListAdapters(
        self, request: admin_pb2.ListAdaptersRequest, context: Any
    ) -> admin_pb2.ListAdaptersResponse:
        return admin_pb2.ListAdaptersResponse(
            adapters=[admin_pb2.AdapterInfo(name=name, generation=0xABC) for name in self.adapters]
        )

    async def Unpin(self, request: admin_pb2.UnpinRequest, context: Any) -> admin_pb2.UnpinResponse:
        if request.pin_id != "p1":
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such pin")
        return admin_pb2.UnpinResponse()

    async def Check(self, request: Any, context: Any) -> Any:
        kind = health_pb2.HealthCheckResponse
        return kind(status=kind.SERVING if self.serving else kind.NOT_SERVING)

    async def _not_scripted(self, request: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "not scripted")

    Drain = FlushCache = _not_scripted
    GetTokenizer = SubscribeKvEvents = WatchBlocks = Explain = Watch = List = _not_scripted


@asynccontextmanager
async def serving(script: ScriptedServer, address: str = "127.0.0.1:0") -> AsyncIterator[str]:
    """Serve a script; yield the address it can be reached at."""
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(cast("Any", script), server)
    control_pb2_grpc.add_ControlServicer_to_server(cast("Any", script), server)
    admin_pb2_grpc.add_AdminServicer_to_server(cast("Any", script), server)
    health_pb2_grpc.add_HealthServicer_to_server(script, server)
    port = server.add_insecure_port(address)
    try:
        await server.start()
        yield address if address.startswith("unix:") else f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Wait until something is so; fail when it takes too long."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)
