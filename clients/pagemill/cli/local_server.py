"""A server of our own for the length of a command: the demo's and the bench's."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from pagemill.cli import processes
from pagemill.cli.connection import connect
from pagemill.cli.model_source import Model
from pagemill.cli.program_settings import server_programs
from pagemill.cli.run_folder import run_folder
from pagemill.client import AsyncClient

_CALL_TIMEOUT_S = 300.0


@asynccontextmanager
async def local_server(
    model: Model, flags: Mapping[str, object], *, own_groups: bool = True
) -> AsyncIterator[AsyncClient]:
    """Serve a model on a free port; yield a client of it.

    Without `own_groups` its programs stay in this process's group, which is stopped as one.

    Raises: CliError if the server does not come up, or ended while it was needed.
    """
    with run_folder() as folder:
        given = {"listen": "127.0.0.1:0", **flags}
        programs = server_programs(model, given, {}, folder)
        async with (
            processes.running(programs, folder, own_groups=own_groups) as address,
            connect(processes.dial_address(address), _CALL_TIMEOUT_S) as client,
        ):
            yield client
