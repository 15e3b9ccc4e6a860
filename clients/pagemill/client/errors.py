"""Why a call failed: one exception per status, with the server's sentence and its advice.

PagemillError
├── InvalidArgumentError     the request can never be served as it is: change it
├── NotFoundError            no such model, no such live request
├── AlreadyExistsError       a live request has this id
├── UnimplementedError       the server does not serve this yet
├── UnauthenticatedError     no credentials, or wrong ones
├── PermissionDeniedError    not with these credentials
├── ResourceExhaustedError   queue full, or read too slowly: wait `retry_after_s`, try again
├── UnavailableError         nobody listens, no worker, or draining: try again later
├── DeadlineExceededError    the call's own timeout passed
├── CallCancelledError       the client was closed, or the server gave the call up
└── InternalError            the server's fault
"""

from typing import ClassVar

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2
from grpc_status import rpc_status


class PagemillError(Exception):
    """A call failed. Its text is the server's sentence."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN
    """The status it stands for."""

    def __init__(
        self, message: str, *, retry_after_s: float | None = None, field: str = ""
    ) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        """Seconds to wait before another try, where the server said so."""
        self.field = field
        """The field of the request that is at fault, where known."""


class InvalidArgumentError(PagemillError):
    """The request can never be served as it is."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class NotFoundError(PagemillError):
    """No such model, or no such live request."""

    code = grpc.StatusCode.NOT_FOUND


class AlreadyExistsError(PagemillError):
    """A live request has this id."""

    code = grpc.StatusCode.ALREADY_EXISTS


class UnimplementedError(PagemillError):
    """The server does not serve this yet."""

    code = grpc.StatusCode.UNIMPLEMENTED


class UnauthenticatedError(PagemillError):
    """The server wants credentials, or better ones."""

    code = grpc.StatusCode.UNAUTHENTICATED


class PermissionDeniedError(PagemillError):
    """These credentials are not enough."""

    code = grpc.StatusCode.PERMISSION_DENIED


class ResourceExhaustedError(PagemillError):
    """The queue is full, a message is too large, or the answer was read too slowly."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class UnavailableError(PagemillError):
    """Nobody listens, no worker is ready, or the server drains."""

    code = grpc.StatusCode.UNAVAILABLE


class DeadlineExceededError(PagemillError):
    """The call's timeout passed first."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class CallCancelledError(PagemillError):
    """The client was closed during the call, or the server gave it up."""

    code = grpc.StatusCode.CANCELLED


class InternalError(PagemillError):
    """The server failed, or broke the protocol."""

    code = grpc.StatusCode.INTERNAL


_KINDS: dict[grpc.StatusCode, type[PagemillError]] = {
    kind.code: kind for kind in PagemillError.__subclasses__()
} | {
    grpc.StatusCode.FAILED_PRECONDITION: InvalidArgumentError,
    grpc.StatusCode.OUT_OF_RANGE: InvalidArgumentError,
    grpc.StatusCode.ABORTED: CallCancelledError,
}


def from_rpc(error: grpc.aio.AioRpcError) -> PagemillError:
    """Return the exception that stands for a failed call, with the details it carries."""
    retry_after_s, field = _details(error)
    kind = _KINDS.get(error.code(), InternalError)
    message = error.details() or f"the call ended with status {error.code().name}"
    return kind(message, retry_after_s=retry_after_s, field=field)


def _details(error: grpc.aio.AioRpcError) -> tuple[float | None, str]:
    """Return (seconds to wait, field at fault) from a status's rich details."""
    retry_after_s, field = None, ""
    try:
        status = rpc_status.from_call(error)
    except (ValueError, DecodeError):
        # Details that contradict the status, or are none: something between us wrote them.
        return None, ""
    for detail in status.details if status is not None else ():
        retry = error_details_pb2.RetryInfo()
        request = error_details_pb2.BadRequest()
        if detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToTimedelta().total_seconds()
        elif detail.Unpack(request) and request.field_violations:
            field = request.field_violations[0].field
    return retry_after_s, field
