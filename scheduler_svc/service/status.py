"""The one table from a refused request to its gRPC status, and the details that go with it."""

from asyncio import CancelledError
from dataclasses import dataclass
from typing import Never

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc import aio
from grpc_status import rpc_status

from scheduler_svc.core.errors import (
    AbortedError,
    AdapterLoadError,
    AdapterSlotsError,
    DeadlineError,
    DuplicateRequestError,
    HopelessDeadlineError,
    InvalidRequestError,
    NotComputedError,
    NotServedError,
    PinQuotaError,
    PrefixNotCachedError,
    QueueFullError,
    RequestError,
    SlowReaderError,
    UnavailableError,
    UnknownAdapterError,
    UnknownModelError,
    UnknownPinError,
)


class UnknownRequestError(RequestError):
    """No live request has any of the ids."""


_DOMAIN = "pagemill"


@dataclass(frozen=True, slots=True)
class Refusal:
    """How a kind of error looks on the wire."""

    code: grpc.StatusCode

    reason: str
    """For programs: `reason` of google.rpc.ErrorInfo."""


# A subclass without a row of its own has its parent's.
REFUSALS: dict[type[RequestError], Refusal] = {
    InvalidRequestError: Refusal(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD"),
    DuplicateRequestError: Refusal(grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_REQUEST_ID"),
    QueueFullError: Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL"),
    SlowReaderError: Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOW_READER"),
    UnknownModelError: Refusal(grpc.StatusCode.NOT_FOUND, "UNKNOWN_MODEL"),
    UnknownAdapterError: Refusal(grpc.StatusCode.NOT_FOUND, "UNKNOWN_ADAPTER"),
    AdapterSlotsError: Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "ADAPTER_SLOTS"),
    AdapterLoadError: Refusal(grpc.StatusCode.FAILED_PRECONDITION, "ADAPTER_LOAD"),
    UnknownRequestError: Refusal(grpc.StatusCode.NOT_FOUND, "UNKNOWN_REQUEST"),
    UnknownPinError: Refusal(grpc.StatusCode.NOT_FOUND, "UNKNOWN_PIN"),
    PrefixNotCachedError: Refusal(grpc.StatusCode.NOT_FOUND, "PREFIX_NOT_CACHED"),
    PinQuotaError: Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "PIN_QUOTA"),
    NotServedError: Refusal(grpc.StatusCode.UNIMPLEMENTED, "NOT_SERVED"),
    NotComputedError: Refusal(grpc.StatusCode.INTERNAL, "NOT_COMPUTED"),
    AbortedError: Refusal(grpc.StatusCode.ABORTED, "ABORTED"),
    UnavailableError: Refusal(grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE"),
    DeadlineError: Refusal(grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"),
    HopelessDeadlineError: Refusal(grpc.StatusCode.DEADLINE_EXCEEDED, "CANNOT_START_IN_TIME"),
    RequestError: Refusal(grpc.StatusCode.FAILED_PRECONDITION, "REFUSED"),
}


def refusal(error: RequestError) -> Refusal:
    """Return the table's row for an error."""
    return next(REFUSALS[kind] for kind in type(error).__mro__ if kind in REFUSALS)


async def refuse(context: "aio.ServicerContext[Message, Message]", error: RequestError) -> Never:
    """End a call with the status of an error, its sentence and its details.

    Raises: what ends the handler; CancelledError for a call that its client has left already,
        as with a deadline that both sides see pass.
    """
    row = refusal(error)
    status = status_pb2.Status(code=row.code.value[0], message=str(error))
    for detail in _details(error, row.reason):
        status.details.add().Pack(detail)
    try:
        await context.abort_with_status(rpc_status.to_status(status))
    except aio.InternalError:
        raise CancelledError from None


def _details(error: RequestError, reason: str) -> list[Message]:
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=reason, domain=_DOMAIN)]
    if isinstance(error, InvalidRequestError):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=str(error)
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, QueueFullError | UnavailableError):
        delay = Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    return details
