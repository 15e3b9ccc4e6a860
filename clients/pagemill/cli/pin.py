"""`pagemill pin` and `pagemill unpin`: a prefix stays in a server's cache, until let go."""

import asyncio
import sys
from typing import Annotated

import typer

from pagemill.cli import options
from pagemill.cli.complete import Prompt, PromptFile, read_prompt
from pagemill.cli.connection import connect
from pagemill.client import Pin

TimeToLive = Annotated[float, typer.Option(help="Seconds until the pin ends by itself.")]
Salt = Annotated[str, typer.Option(help="The salt of the requests that use the prefix.")]
Tenant = Annotated[str, typer.Option(help="The tenant of those requests. Empty: none.")]
PinId = Annotated[str, typer.Argument(metavar="PIN_ID", help="As `pagemill pin` printed it.")]


def pin(
    prompt: Prompt = None,
    prompt_file: PromptFile = None,
    time_to_live: TimeToLive = 3600.0,
    salt: Salt = "",
    tenant: Tenant = "",
    server: options.Server = options.DEFAULT_SERVER,
    model: options.ServedModel = "",
    timeout: options.Timeout = 30.0,
) -> None:
    """Keep what is cached of a text's blocks; print the pin's id and how many blocks it holds.

    The text must have been asked before. The server must allow pins: --max-pinned-share.
    """
    text = read_prompt(prompt, prompt_file)
    made = asyncio.run(_pin(server, timeout, text, time_to_live, salt, tenant, model))
    sys.stdout.write(f"{made.pin_id} {made.num_blocks}\n")


def unpin(
    pin_id: PinId,
    server: options.Server = options.DEFAULT_SERVER,
    timeout: options.Timeout = 30.0,
) -> None:
    """Let go of a pinned prefix."""
    asyncio.run(_unpin(server, timeout, pin_id))


async def _pin(
    server: str,
    timeout_s: float,
    text: str,
    time_to_live_s: float,
    salt: str,
    tenant: str,
    model: str,
) -> Pin:
    async with connect(server, timeout_s) as client:
        token_ids = await client.tokenize(text, model=model)
        return await client.pin(token_ids, time_to_live_s, salt=salt, tenant=tenant, model=model)


async def _unpin(server: str, timeout_s: float, pin_id: str) -> None:
    async with connect(server, timeout_s) as client:
        await client.unpin(pin_id)
