"""Registers a servicer so that unreadable bytes and refused requests end with a sentence.

A servicer's methods raise RequestError; none of them knows a status. Left to itself, grpc
answers UNKNOWN to bytes that do not parse, before any method is called: a text that is no
UTF-8 is the common case.
"""

from asyncio import CancelledError, current_task
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import NoReturn, TypeAlias

import grpc
from google.protobuf.descriptor import Descriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from grpc import aio

from scheduler_svc.core.errors import InvalidRequestError, NotServedError, RequestError
from scheduler_svc.service.status import refuse
from scheduler_svc.service.utf8_check import field_without_utf8

Context: TypeAlias = "aio.ServicerContext[Message, Message]"
_Unary: TypeAlias = Callable[[Message, Context], Awaitable[Message]]
_Stream: TypeAlias = Callable[[Message, Context], AsyncGenerator[Message, None]]


@dataclass(frozen=True, slots=True)
class _Unreadable:
    """What stands in for a message whose bytes do not parse."""

    error: InvalidRequestError


def add_servicer(server: aio.Server, service: ServiceDescriptor, servicer: object) -> None:
    """Serve each method of `service` by the method of that name of `servicer`.

    Unary methods are coroutines; those that stream are asynchronous generators. A method that
    the servicer lacks is answered UNIMPLEMENTED.
    """
    handlers = {method.name: _handler(method, servicer) for method in service.methods}
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service.full_name, handlers),)
    )


def _handler(
    method: MethodDescriptor, servicer: object
) -> "grpc.RpcMethodHandler[Message | _Unreadable, Message]":
    request_type = GetMessageClass(method.input_type)
    response_type = GetMessageClass(method.output_type)
    behaviour = getattr(servicer, method.name, None) or _not_served(method)

    def read(data: bytes) -> Message | _Unreadable:
        try:
            return request_type.FromString(data)
        except DecodeError:
            return _Unreadable(_complaint(method.input_type, data))

    if method.server_streaming:
        return grpc.unary_stream_rpc_method_handler(
            _streaming(behaviour), read, response_type.SerializeToString
        )
    return grpc.unary_unary_rpc_method_handler(
        _unary(behaviour), read, response_type.SerializeToString
    )


def _not_served(method: MethodDescriptor) -> Callable[[Message, Context], NoReturn]:
    def refuse_call(_request: Message, _context: Context) -> NoReturn:
        name = f"{method.containing_service.name}.{method.name}"
        raise NotServedError("", f"{name} is not served by this version")

    return refuse_call


def _unary(behaviour: _Unary) -> Callable[[Message | _Unreadable, Context], Awaitable[Message]]:
    async def call(request: Message | _Unreadable, context: Context) -> Message:
        try:
            return await behaviour(_readable(request), context)
        except RequestError as error:
            return await refuse(context, error)
        except CancelledError:
            await _end_if_cancelled_inside(context)
            raise

    return call


def _streaming(
    behaviour: _Stream,
) -> Callable[[Message | _Unreadable, Context], AsyncIterator[Message]]:
    # A generator around the generator costs 0.3 us a message; grpc takes nothing else for a
    # stream of responses. `aclosing` ends the inner one when the call is cancelled.
    async def call(request: Message | _Unreadable, context: Context) -> AsyncIterator[Message]:
        try:
            async with aclosing(behaviour(_readable(request), context)) as responses:
                async for response in responses:
                    yield response
        except RequestError as error:
            await refuse(context, error)
        except CancelledError:
            await _end_if_cancelled_inside(context)
            raise

    return call


async def _end_if_cancelled_inside(context: Context) -> None:
    """End a call that its client did not cancel: grpc would leave that client waiting for ever."""
    task = current_task()
    if task is not None and not task.cancelling():
        await context.abort(grpc.StatusCode.INTERNAL, "something inside the server was cancelled")


def _readable(request: Message | _Unreadable) -> Message:
    if isinstance(request, _Unreadable):
        raise request.error
    return request


def _complaint(descriptor: Descriptor, data: bytes) -> InvalidRequestError:
    name = descriptor.name
    field = field_without_utf8(descriptor, data)
    if field is None:
        return InvalidRequestError("", f"the {len(data)} bytes are no {name} message")
    return InvalidRequestError(field, f"{field} of {name} is not UTF-8 text")
