"""`pagemill scheduler`, `worker`, `simulate`: one program alone, in place of this process."""

import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from pagemill.cli.extras import check_installed
from pagemill.cli.model_source import Model, resolve
from pagemill.cli.program_settings import program

# Every argument goes on to the program, --help too: its settings are documented there.
PASS_ON: dict[str, Any] = {
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
    "help_option_names": [],
}

Arguments = Annotated[
    list[str] | None, typer.Argument(metavar="MODEL [SETTINGS]...", help="Or --help.")
]

Options = Annotated[list[str] | None, typer.Argument(metavar="[OPTIONS]...", help="Or --help.")]


def scheduler(arguments: Arguments = None) -> None:
    """Run the scheduler alone; workers dial in to its --worker-listen. --help: its settings."""
    _become("scheduler_svc", arguments or [])


def worker(arguments: Arguments = None) -> None:
    """Run a worker alone; it dials in to the scheduler at --join. --help: its settings."""
    _become("worker_svc", arguments or [])


def simulate(options: Options = None) -> None:
    """Replay a load against the scheduler's core, without a model. --help: its options."""
    _replace_by(program("scheduler_svc.simulate", *(options or [])), {})


def bench_step(options: Options = None) -> None:
    """Time the scheduler's own work for a step, and weigh its plan. --help: its options."""
    _replace_by(program("scheduler_svc.bench_step", *(options or [])), {})


def bench_kernels(options: Options = None) -> None:
    """Time a CPU's kernels beside what torch has for the same. --help: its options."""
    _replace_by(program("worker_svc.bench_kernels", *(options or [])), {})


def _become(module: str, arguments: Sequence[str]) -> None:
    _replace_by(*prepared(module, arguments))


def _replace_by(command: tuple[str, ...], environment: Mapping[str, str]) -> None:
    os.execve(command[0], command, {**environment, **os.environ})  # noqa: S606 no shell is wanted


def prepared(module: str, arguments: Sequence[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return a program's command line, its model found, and what its environment lacks.

    The model's name is only usual: the environment and the flags may give others.

    Raises: CliError for a model that is not there, or a program that is not installed.
    """
    check_installed(module)
    if not arguments or arguments[0].startswith("-"):
        return program(module, *arguments), {}
    model: Model = resolve(arguments[0])
    command = program(module, str(model.path), *arguments[1:])
    return command, {"PAGEMILL_SERVED_MODEL_NAME": model.name}
