"""`pagemill bench hash`: what it costs the scheduler to name a block."""

import json
import subprocess
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from pagemill.cli.exit_status import CliError
from pagemill.cli.program_settings import program

_TIMEOUT_S = 120.0

Json = Annotated[bool, typer.Option("--json", help="Print a JSON object for each algorithm.")]


def bench_hash(as_json: Json = False) -> None:
    """Measure the microseconds per block of 16 tokens, for each algorithm of block names."""
    lines = _measured(program("scheduler_svc.bench_hash"))
    if as_json:
        sys.stdout.write(lines)
        return
    table = Table(title="Naming a block of 16 tokens", title_style="")
    table.add_column("algorithm")
    table.add_column("us per block", justify="right")
    for line in map(json.loads, lines.splitlines()):
        table.add_row(line["algorithm"], f"{line['us_per_block']:.2f}")
    Console().print(table)


def _measured(command: tuple[str, ...]) -> str:
    try:
        ended = subprocess.run(  # noqa: S603 our own program
            command, stdout=subprocess.PIPE, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise CliError(f"the measurement took more than {_TIMEOUT_S:g} s") from error
    if ended.returncode:
        raise CliError(f"the measurement ended with status {ended.returncode}")
    return ended.stdout
