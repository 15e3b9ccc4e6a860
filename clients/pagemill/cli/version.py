"""`pagemill version`: what is installed here, and what a server runs."""

import asyncio
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from pagemill.cli.connection import connect

_PARTS = ("pagemill", "grpcio", "protobuf", "torch")
_TIMEOUT_S = 10.0

AskServer = Annotated[
    str | None, typer.Option("--server", metavar="ADDRESS", help="Ask a server for its own.")
]


def show_version(server: AskServer = None) -> None:
    """Print the versions of this program and of what it stands on."""
    for part in _PARTS:
        sys.stdout.write(f"{part} {_installed(part)}\n")
    sys.stdout.write(f"python {sys.version.split()[0]}\n")
    if server is not None:
        sys.stdout.write(f"server {asyncio.run(_of_server(server))}\n")


def _installed(part: str) -> str:
    try:
        return version(part)
    except PackageNotFoundError:
        return "not installed"


async def _of_server(server: str) -> str:
    async with connect(server, _TIMEOUT_S) as client:
        return (await client.server_info()).version
