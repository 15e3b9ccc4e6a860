"""How the command ends: one status per kind of failure, and the error that carries it."""

from enum import IntEnum

from pagemill.client import (
    AlreadyExistsError,
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    PagemillError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
    UnimplementedError,
)


class ExitStatus(IntEnum):
    """Status of `pagemill`, for scripts. `serve` passes a child's own status on instead."""

    OK = 0
    """Done; for `serve`, asked to stop and stopped."""

    FAILED = 1
    """Something broke that no other status names."""

    USAGE = 2
    """The command line, a setting, or the name of a model is impossible."""

    REFUSED = 3
    """The server will not do this: change the request."""

    UNAVAILABLE = 4
    """No server, no worker, no room, or not in time: try again later."""

    INTERRUPTED = 130
    """Ctrl-C."""


class CliError(Exception):
    """The command cannot go on. Printed as it is, and the process ends with the status."""

    def __init__(self, message: str, status: int = ExitStatus.FAILED) -> None:
        super().__init__(message)
        self.status = status


_STATUS: dict[type[PagemillError], ExitStatus] = {
    InvalidArgumentError: ExitStatus.REFUSED,
    NotFoundError: ExitStatus.REFUSED,
    AlreadyExistsError: ExitStatus.REFUSED,
    UnimplementedError: ExitStatus.REFUSED,
    UnauthenticatedError: ExitStatus.REFUSED,
    PermissionDeniedError: ExitStatus.REFUSED,
    ResourceExhaustedError: ExitStatus.UNAVAILABLE,
    UnavailableError: ExitStatus.UNAVAILABLE,
    DeadlineExceededError: ExitStatus.UNAVAILABLE,
    InternalError: ExitStatus.FAILED,
}


def from_client(error: PagemillError) -> CliError:
    """Return a failed call as this command's own error."""
    status = _STATUS.get(type(error), ExitStatus.FAILED)
    advice = "" if error.retry_after_s is None else f" (try again in {error.retry_after_s:g} s)"
    kind = error.code.name.lower().replace("_", " ")
    return CliError(f"{kind}: {error}{advice}", status)
