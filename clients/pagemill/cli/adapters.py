"""`pagemill adapters`: load, unload and list what requests can name as their adapter."""

import asyncio
import sys
from typing import Annotated

import typer

from pagemill.cli import options
from pagemill.cli.connection import connect
from pagemill.client import AdapterInfo

app = typer.Typer(help="Load and unload adapters.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NAME", help="What requests call it.")]
Path = Annotated[
    str,
    typer.Argument(
        metavar="PATH", help="Of a PEFT LoRA checkpoint, below the workers' --adapter-dir."
    ),
]


@app.command("load")
def load(
    name: Name,
    path: Path,
    server: options.Server = options.DEFAULT_SERVER,
    timeout: options.Timeout = 300.0,
) -> None:
    """Load an adapter into every worker; print its name and the generation of its content."""
    generation = asyncio.run(_load(server, timeout, name, path))
    sys.stdout.write(f"{name} {generation:016x}\n")


@app.command("unload")
def unload(
    name: Name,
    server: options.Server = options.DEFAULT_SERVER,
    timeout: options.Timeout = 300.0,
) -> None:
    """Refuse an adapter to new requests, and wait for those that use it."""
    asyncio.run(_unload(server, timeout, name))


@app.command("list")
def list_loaded(
    server: options.Server = options.DEFAULT_SERVER, timeout: options.Timeout = 30.0
) -> None:
    """Print each loaded adapter's name and generation."""
    for adapter in asyncio.run(_list(server, timeout)):
        sys.stdout.write(f"{adapter.name} {adapter.generation:016x}\n")


async def _load(server: str, timeout_s: float, name: str, path: str) -> int:
    async with connect(server, timeout_s) as client:
        return await client.load_adapter(name, path)


async def _unload(server: str, timeout_s: float, name: str) -> None:
    async with connect(server, timeout_s) as client:
        await client.unload_adapter(name)


async def _list(server: str, timeout_s: float) -> tuple[AdapterInfo, ...]:
    async with connect(server, timeout_s) as client:
        return await client.adapters()
