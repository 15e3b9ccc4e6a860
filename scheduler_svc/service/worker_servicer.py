"""The listener that workers dial in to: bytes in and out of a worker's link."""

import asyncio
from collections.abc import AsyncIterator

import grpc
from grpc import aio

from pagemill.v1 import worker_pb2
from scheduler_svc.service.worker_group import JoinRefusedError, WorkerGroup
from scheduler_svc.service.worker_link import WorkerLink
from scheduler_svc.service.worker_wire import MalformedMessageError, decode_message

HELLO_LIMIT_S = 10.0
"""Seconds a new stream has to say hello."""

LAST_WRITE_LIMIT_S = 1.0
"""Seconds for a write that was under way when its stream ended."""


class WorkerServicer:
    """Serves pagemill.v1.Worker. Messages pass as bytes: the link counts and times them."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group

    async def Join(
        self, requests: AsyncIterator[bytes], context: "aio.ServicerContext[bytes, bytes]"
    ) -> None:
        """Keep one worker's stream. However this ends, the link is closed first."""
        try:
            link = self._group.admit(await _read_hello(requests))
        except JoinRefusedError as refusal:
            await context.abort(refusal.code, str(refusal))
        writing = asyncio.create_task(_write_outgoing(link, context))
        try:
            async for raw in requests:
                link.receive(raw)
        finally:
            link.close("its connection ended")
            await asyncio.wait({writing}, timeout=LAST_WRITE_LIMIT_S)
            writing.cancel()


async def _read_hello(requests: AsyncIterator[bytes]) -> worker_pb2.WorkerHello:
    try:
        async with asyncio.timeout(HELLO_LIMIT_S):
            message = decode_message(await anext(requests, b""))
    except TimeoutError:
        raise JoinRefusedError(
            grpc.StatusCode.ABORTED, f"no hello within {HELLO_LIMIT_S:g} s"
        ) from None
    except MalformedMessageError as error:
        raise JoinRefusedError(grpc.StatusCode.ABORTED, str(error)) from error
    if not message.HasField("hello"):
        raise JoinRefusedError(grpc.StatusCode.ABORTED, "the first message must be hello")
    return message.hello


async def _write_outgoing(link: WorkerLink, context: "aio.ServicerContext[bytes, bytes]") -> None:
    try:
        while (message := await link.next_outgoing()) is not None:
            await context.write(message)
        if link.ending is not None:
            await context.abort(link.ending.code, link.ending.reason)
    except aio.BaseError as error:
        # `abort` reports itself this way, and so does a write that nobody can receive.
        link.close(f"writing to it failed: {error}")


def add_worker_servicer(server: aio.Server, group: WorkerGroup) -> None:
    """Serve Join on a server. Without codecs, messages reach the servicer as bytes."""
    service = worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name
    join: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(
        WorkerServicer(group).Join
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {"Join": join}),)
    )
