"""The way from a command to its server."""

from pagemill.cli.exit_status import CliError, ExitStatus
from pagemill.client import AsyncClient


def connect(server: str, timeout_s: float) -> AsyncClient:
    """Return a client for an address from the command line.

    Raises: CliError if the address is none, or the timeout has no end.
    """
    try:
        return AsyncClient(server, timeout=timeout_s)
    except ValueError as error:
        raise CliError(str(error), ExitStatus.USAGE) from error
