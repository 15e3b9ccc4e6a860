"""The client for asyncio programs."""

# A call's timeout travels to the server, which frees what the call holds when it passes.
# ruff: noqa: ASYNC109

import asyncio
import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from types import TracebackType
from typing import Self, TypeVar, Unpack

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagemill.client import errors, server_wire, wire
from pagemill.client.arguments import ChatArguments, GenerateArguments
from pagemill.client.channel import Keepalive, open_channel
from pagemill.client.embedding import Embeddings, Pooling, embed_request, embeddings
from pagemill.client.events import Collector, Completion, Event
from pagemill.client.one_field import filled
from pagemill.client.retry import Attempts, RetryPolicy
from pagemill.client.server_facts import AbortResult, AdapterInfo, Load, ModelInfo, Pin, ServerInfo
from pagemill.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    control_pb2,
    control_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
)

RequestT = TypeVar("RequestT", bound=Message)
ResponseT = TypeVar("ResponseT", bound=Message)


class AsyncClient:
    """A connection to one server. Belongs to the event loop it is made in.

        async with AsyncClient("127.0.0.1:50051") as client:
            async for event in client.generate(prompt="Once upon a time", max_tokens=32):
                ...

    Every call ends: `timeout` bounds it, retries included. A call that finds no server is
    tried again, within `retry`; one that has begun to answer never is. Leaving the loop over
    `generate`, or cancelling the task, cancels the call, and the server frees what it held.

    Raises: PagemillError and its kinds, from every call; ValueError from the constructor.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout: float = 300.0,
        retry: RetryPolicy | None = None,
        keepalive: Keepalive | None = None,
        metadata: Mapping[str, str] | None = None,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        """Prepare a client; it connects with its first call.

        Args:
            address: HOST:PORT or unix:PATH.
            timeout: Seconds a call may take, where the call does not say otherwise.
            retry: When to try again.
            keepalive: How a dead connection is noticed.
            metadata: Sent with every call: a token as `authorization`, a `traceparent`.
            credentials: For TLS. None: plain text.
        """
        self._timeout_s = _checked_timeout(timeout)
        self._retry = retry or RetryPolicy()
        self._metadata = grpc.aio.Metadata(*(metadata or {}).items())
        # gRPC binds a channel to a loop; without one it would bind it to a loop that never runs.
        asyncio.get_running_loop()
        self._channel = open_channel(address, keepalive or Keepalive(), credentials)
        self._inference = inference_pb2_grpc.InferenceStub(self._channel)
        self._control = control_pb2_grpc.ControlStub(self._channel)
        self._admin = admin_pb2_grpc.AdminStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel what runs and disconnect."""
        await self._channel.close()

    def generate(
        self, *, timeout: float | None = None, **arguments: Unpack[GenerateArguments]
    ) -> AsyncGenerator[Event, None]:
        """Return the events of one generation, as they arrive.

        Raises: PagemillError, while iterating; InvalidArgumentError and TypeError at once
            for arguments that cannot be sent.
        """
        request = wire.generate_request(arguments)
        return self._events(request, self._timeout(timeout))

    async def complete(
        self, *, timeout: float | None = None, **arguments: Unpack[GenerateArguments]
    ) -> Completion:
        """Return a generation once it has ended."""
        collector = Collector()
        async for event in self.generate(timeout=timeout, **arguments):
            collector.add(event)
        return collector.completion()

    async def tokenize(
        self,
        text: str | None = None,
        *,
        model: str = "",
        omit_special_tokens: bool = False,
        timeout: float | None = None,
        **chat: Unpack[ChatArguments],
    ) -> tuple[int, ...]:
        """Return the token ids of a text, or of `messages` under the chat template."""
        request = wire.tokenize_request(text, chat, model, omit_special_tokens=omit_special_tokens)
        response = await self._unary(self._inference.Tokenize, request, timeout)
        return tuple(response.token_ids)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        keep_special_tokens: bool = False,
        timeout: float | None = None,
    ) -> str:
        """Return the text of token ids."""
        request = wire.detokenize_request(token_ids, model, keep_special_tokens=keep_special_tokens)
        return (await self._unary(self._inference.Detokenize, request, timeout)).text

    async def embed(
        self,
        inputs: Sequence[str] | Sequence[Sequence[int]],
        *,
        pooling: Pooling = "last",
        normalize: bool = False,
        model: str = "",
        request_id: str = "",
        timeout: float | None = None,
    ) -> Embeddings:
        """Return one vector of hidden states for each text, or list of token ids.

        `normalize` makes vectors of length 1.
        """
        request = embed_request(
            inputs, pooling=pooling, normalize=normalize, model=model, request_id=request_id
        )
        return embeddings(await self._unary(self._inference.Embed, request, timeout))

    async def server_info(self, *, timeout: float | None = None) -> ServerInfo:
        """Return how the server is set."""
        request = control_pb2.GetServerInfoRequest()
        return server_wire.server_info(
            await self._unary(self._control.GetServerInfo, request, timeout)
        )

    async def model_info(self, model: str = "", *, timeout: float | None = None) -> ModelInfo:
        """Return what a served model is; the default one for an empty name."""
        request = filled(control_pb2.GetModelInfoRequest, model=model)
        return server_wire.model_info(
            await self._unary(self._control.GetModelInfo, request, timeout)
        )

    async def load(self, *, timeout: float | None = None) -> Load:
        """Return how busy the server is, and where its recent steps spent their time."""
        request = control_pb2.GetLoadRequest()
        return server_wire.load(await self._unary(self._control.GetLoad, request, timeout))

    async def abort(
        self, request_ids: Sequence[str], *, tenant: str = "", timeout: float | None = None
    ) -> AbortResult:
        """End a tenant's live requests; their streams finish with reason ABORT.

        Raises: NotFoundError if none of the ids is live.
        """
        request = filled(control_pb2.AbortRequest, request_ids=request_ids, tenant=tenant)
        return server_wire.abort_result(await self._unary(self._control.Abort, request, timeout))

    async def abort_all(
        self, *, tenant: str | None = "", timeout: float | None = None
    ) -> AbortResult:
        """End every live request of a tenant; None: of all tenants."""
        request = filled(
            control_pb2.AbortRequest, all=True, tenant=tenant or "", all_tenants=tenant is None
        )
        return server_wire.abort_result(await self._unary(self._control.Abort, request, timeout))

    async def pin(
        self,
        token_ids: Sequence[int],
        time_to_live: float,
        *,
        salt: str = "",
        tenant: str = "",
        model: str = "",
        timeout: float | None = None,
    ) -> Pin:
        """Keep what is cached of a prefix for `time_to_live` seconds, however long it is idle.

        It serves requests of the same salt and tenant.

        Raises: NotFoundError if not even its first block is cached: let a request compute it
            first; ResourceExhaustedError beyond the server's quota.
        """
        request = filled(
            admin_pb2.PinRequest,
            model=model,
            token_ids=token_ids,
            time_to_live_s=time_to_live,
            salt=salt,
            tenant=tenant,
        )
        response = await self._unary(self._admin.Pin, request, timeout)
        return Pin(response.pin_id, response.num_blocks)

    async def unpin(self, pin_id: str, *, timeout: float | None = None) -> None:
        """Let go of a pinned prefix.

        Raises: NotFoundError if the pin has ended, or never was.
        """
        await self._unary(self._admin.Unpin, filled(admin_pb2.UnpinRequest, pin_id=pin_id), timeout)

    async def load_adapter(self, name: str, path: str, *, timeout: float | None = None) -> int:
        """Load an adapter from below the workers' directory of adapters; return its generation.

        Requests that run under this name end with what they began with.

        Raises: InvalidArgumentError if a worker cannot load it; ResourceExhaustedError if as
            many are loaded as may be.
        """
        request = filled(admin_pb2.LoadAdapterRequest, name=name, path=path)
        response = await self._unary(self._admin.LoadAdapter, request, timeout)
        return response.generation

    async def unload_adapter(self, name: str, *, timeout: float | None = None) -> None:
        """Refuse an adapter to new requests, and return when none uses it any more.

        Raises: NotFoundError if it is not loaded; DeadlineExceededError if some use it still: it
            goes with the last of them.
        """
        request = filled(admin_pb2.UnloadAdapterRequest, name=name)
        await self._unary(self._admin.UnloadAdapter, request, timeout)

    async def adapters(self, *, timeout: float | None = None) -> tuple[AdapterInfo, ...]:
        """Return the adapters that requests can name, in order of name."""
        response = await self._unary(
            self._admin.ListAdapters, admin_pb2.ListAdaptersRequest(), timeout
        )
        return tuple(AdapterInfo(each.name, each.generation) for each in response.adapters)

    async def health(self, *, timeout: float | None = None) -> bool:
        """Tell whether the server can answer; it cannot while a worker loads, or draining."""
        request = health_pb2.HealthCheckRequest()
        response = await self._unary(self._health.Check, request, timeout)
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    async def _events(
        self, request: inference_pb2.GenerateRequest, timeout_s: float
    ) -> AsyncGenerator[Event, None]:
        attempts = Attempts(self._retry, timeout_s)
        while True:
            call = self._inference.Generate(
                request, timeout=attempts.remaining_s(), metadata=self._metadata
            )
            answered = False
            try:
                async for message in call:
                    answered = True
                    for event in wire.events(message):
                        yield event
            except grpc.aio.AioRpcError as error:
                failure = errors.from_rpc(error)
                if answered:
                    raise failure from error
                await attempts.pause(failure)
            except asyncio.CancelledError as error:
                if _task_is_cancelled():
                    raise
                raise errors.CallCancelledError("the client was closed during the call") from error
            else:
                return
            finally:
                # Nothing happens to a call that has ended.
                call.cancel()

    async def _unary(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[RequestT, ResponseT],
        request: RequestT,
        timeout: float | None,
    ) -> ResponseT:
        attempts = Attempts(self._retry, self._timeout(timeout))
        while True:
            call = method(request, timeout=attempts.remaining_s(), metadata=self._metadata)
            try:
                return await call
            except grpc.aio.AioRpcError as error:
                await attempts.pause(errors.from_rpc(error))
            except asyncio.CancelledError as error:
                if _task_is_cancelled():
                    raise
                raise errors.CallCancelledError("the client was closed during the call") from error

    def _timeout(self, timeout: float | None) -> float:
        return self._timeout_s if timeout is None else _checked_timeout(timeout)


def _task_is_cancelled() -> bool:
    """Tell whether a CancelledError unwinds the task; gRPC also raises it for a closed channel."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _checked_timeout(timeout: float) -> float:
    if not (timeout > 0 and math.isfinite(timeout)):
        raise ValueError(f"timeout is {timeout}, must be above 0 seconds and finite")
    return timeout
