"""`pagemill demo`: one question to a real model, and where each step's time went."""

import asyncio
import sys
import time

from rich.console import Console
from rich.table import Table

from pagemill.cli import extras
from pagemill.cli.local_server import local_server
from pagemill.cli.model_source import DEMO, Model, resolve
from pagemill.cli.streaming import account, write_text
from pagemill.client import AsyncClient, StepTimes

_QUESTION = "In two sentences: why do computers use virtual memory?"
_MAX_TOKENS = 64


def demo() -> None:
    """Fetch the demo model, serve it on this CPU, ask it a question twice, and stop it again."""
    console = Console(highlight=False)
    extras.check_installed(*extras.SERVER)
    model = resolve(DEMO)
    asyncio.run(_demo(console, model))


async def _demo(console: Console, model: Model) -> None:
    console.print("Starting a scheduler and a CPU worker ...", style="dim")
    started_s = time.monotonic()
    async with local_server(model, {"device": "cpu", "dtype": "float32"}) as client:
        console.print(f"Ready after {time.monotonic() - started_s:.1f} s.\n", style="dim")
        console.print(_QUESTION, style="bold")
        await _ask(console, client)
        console.print("The same question again: its prefix is in the cache now.", style="bold")
        await _ask(console, client)
        load = await client.load()
        if load.recent_steps is not None:
            console.print(f"Where the time of {load.recent_steps.steps} steps went, on average:")
            console.print(_table(load.recent_steps))
    console.print("Both processes have stopped.", style="dim")


async def _ask(console: Console, client: AsyncClient) -> None:
    events = client.generate(
        messages=[{"role": "user", "content": _QUESTION}], temperature=0.0, max_tokens=_MAX_TOKENS
    )
    completion = await write_text(events, sys.stdout)
    console.print(f"  {account(completion)}\n", style="dim", markup=False, soft_wrap=True)


def _table(times: StepTimes) -> Table:
    """Return where a mean step's time went, as a table."""
    parts = {
        "schedule": times.schedule_s,
        "encode": times.encode_s,
        "wire": times.wire_s,
        "worker wait": times.worker_wait_s,
        "model": times.model_s,
        "emit": times.emit_s,
    }
    # With two plans in flight the parts overlap, and add up to more than a step.
    table = Table(caption="worker wait and wire pass while the step before still runs")
    table.add_column("part of a step")
    table.add_column("ms", justify="right")
    for name, seconds in parts.items():
        table.add_row(name, f"{1000 * seconds:.3f}")
    table.add_section()
    table.add_row("from result to result", f"{1000 * times.step_s:.3f}")
    return table
