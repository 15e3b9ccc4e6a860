"""`pagemill chat`: a conversation on the terminal."""

import asyncio
import contextlib
import sys
from typing import Annotated

import typer
from rich.console import Console

from pagemill.cli import options
from pagemill.cli.connection import connect
from pagemill.cli.exit_status import from_client
from pagemill.cli.streaming import account, write_text
from pagemill.client import AsyncClient, Completion, GenerateArguments, PagemillError
from pagemill.client.arguments import JsonObject

# Gives input() a history and line editing, where the platform has it.
with contextlib.suppress(ImportError):
    import readline  # noqa: F401

Quick = Annotated[str | None, typer.Option(metavar="TEXT", help="Ask this once, and leave.")]


def chat(
    quick: Quick = None,
    server: options.Server = options.DEFAULT_SERVER,
    system: options.System = None,
    model: options.ServedModel = "",
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    seed: options.Seed = None,
    timeout: options.Timeout = 300.0,
) -> None:
    """Talk to the model. Ctrl-C stops an answer; at the prompt it leaves, as Ctrl-D does."""
    arguments = GenerateArguments(
        model=model,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
    )
    turns: list[JsonObject] = [] if system is None else [{"role": "system", "content": system}]
    # One loop over all turns: the connection lives in it, while input() waits outside of it.
    with asyncio.Runner() as runner:
        client = runner.run(_connected(server, timeout))
        try:
            if quick is not None:
                turns.append({"role": "user", "content": quick})
                runner.run(_answer(client, turns, arguments))
            else:
                _converse(runner, client, turns, arguments)
        finally:
            runner.run(client.close())


def _converse(
    runner: asyncio.Runner,
    client: AsyncClient,
    turns: list[JsonObject],
    arguments: GenerateArguments,
) -> None:
    """Ask and answer until the person leaves. A turn without an answer is forgotten."""
    console = Console(stderr=True, highlight=False)
    console.print("Ctrl-C stops an answer, Ctrl-D leaves.", style="dim")
    while (text := _read_line()) is not None:
        turns.append({"role": "user", "content": text})
        try:
            completion = runner.run(_answer(client, turns, arguments))
        except KeyboardInterrupt:
            turns.pop()
            console.print("(stopped)", style="dim")
        except PagemillError as error:
            turns.pop()
            console.print(str(from_client(error)), style="red", markup=False, soft_wrap=True)
        else:
            turns.append({"role": "assistant", "content": completion.text})
            console.print(account(completion), style="dim", markup=False, soft_wrap=True)


def _read_line() -> str | None:
    """Return a line that says something, or None if the person leaves."""
    try:
        while not (text := input("> ").strip()):
            pass
    except (EOFError, KeyboardInterrupt):
        sys.stdout.write("\n")
        return None
    return text


async def _connected(server: str, timeout_s: float) -> AsyncClient:
    return connect(server, timeout_s)


async def _answer(
    client: AsyncClient, turns: list[JsonObject], arguments: GenerateArguments
) -> Completion:
    request: GenerateArguments = {**arguments, "messages": turns}
    return await write_text(client.generate(**request), sys.stdout)
