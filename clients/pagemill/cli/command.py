"""The `pagemill` command: its parts, and what becomes of their errors."""

import os
import sys

import typer

from pagemill.cli import adapters, bench, single_program
from pagemill.cli.chat import chat
from pagemill.cli.complete import complete
from pagemill.cli.demo import demo
from pagemill.cli.embed import embed
from pagemill.cli.exit_status import CliError, from_client
from pagemill.cli.pin import pin, unpin
from pagemill.cli.serve import serve
from pagemill.cli.terminal import say
from pagemill.cli.version import show_version
from pagemill.client import PagemillError


def make_app() -> typer.Typer:
    """Return the command with all its parts."""
    app = typer.Typer(
        help="Serve large language models, and talk to them.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    app.command("serve")(serve)
    app.command("scheduler", context_settings=single_program.PASS_ON)(single_program.scheduler)
    app.command("worker", context_settings=single_program.PASS_ON)(single_program.worker)
    app.command("simulate", context_settings=single_program.PASS_ON)(single_program.simulate)
    app.command("complete")(complete)
    app.command("chat")(chat)
    app.command("embed")(embed)
    app.command("pin")(pin)
    app.command("unpin")(unpin)
    app.command("demo")(demo)
    app.add_typer(adapters.app, name="adapters")
    app.add_typer(bench.app, name="bench")
    app.command("version")(show_version)
    return app


# How long a worker's idle OpenMP threads spin before they sleep, in turns of a loop (about 0.1
# ms). libgomp's own 300,000 keep a core from the scheduler and the clients beside it: with 2
# threads on 2 cores, 16 rows, the engine then reached 0.85 of the bare loop, so 0.97.
_SPIN_COUNT = "20000"


def main() -> None:
    """Run the command line of this process; never returns."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)
    # Of torch's warnings in C++, ranks that part with one another give one with a stack each; what
    # is lost, the worker's own log says.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        make_app()(prog_name="pagemill")
    except CliError as error:
        say(str(error))
        sys.exit(error.status)
    except PagemillError as error:
        failure = from_client(error)
        say(str(failure))
        sys.exit(failure.status)
