"""`pagemill bench throughput`: tokens per second over gRPC, cell by cell."""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from pagemill.cli import options
from pagemill.cli.bench_cell import Cell
from pagemill.cli.exit_status import CliError, ExitStatus
from pagemill.cli.input_lines import input_lines
from pagemill.cli.local_server import local_server
from pagemill.cli.model_source import DEMO, Model, resolve
from pagemill.cli.other_load import OtherLoad
from pagemill.cli.read_floor import ReadFloor, read_floor
from pagemill.client import AsyncClient, Completion, InvalidArgumentError

BenchModel = Annotated[str, typer.Argument(metavar="MODEL", help="As for serve.")]
Cells = Annotated[
    list[str] | None,
    typer.Option("--cell", metavar="CELL", help="REQUESTSxINPUTxOUTPUT. Repeatable."),
]
Quantization = Annotated[str, typer.Option(help="Of the weights: none, int8 or int4.")]
Repeat = Annotated[int, typer.Option(min=1, help="Runs of each cell; the median counts.")]
Seed = Annotated[int, typer.Option(help="Of the prompts.")]
Stdin = Annotated[
    bool,
    typer.Option("--stdin", help="Read cells from standard input, and answer each with a line."),
]

_DEFAULT_CELLS = ("1x128x64", "32x128x64", "32x256x128", "8x1024x16", "64x128x128")
_WARM_UP = (Cell(2, 64, 4), Cell(16, 64, 4))
# Seconds between two messages of a stream: its tokens pile up meanwhile, and its end never waits.
_MIN_INTERVAL_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One run of a cell. What `--json` prints."""

    cell: str
    """As it was asked for."""

    output_tok_s: float
    """Generated tokens per second of wall time, prompt processing included."""

    total_tok_s: float
    """Tokens of prompts and outputs per second."""

    wall_s: float
    """From the first request to the last summary."""

    mean_step_ms: float
    """Wall time over the engine's steps."""

    steps: int
    """The engine's steps."""

    ttft_s: float
    """Time to the first token, the mean of all requests, by the server's clock."""

    complete: bool
    """Every request ran to its full length."""

    other_cpu: float | None
    """Cores that others kept busy meanwhile. None: unknown."""

    decode_step_ms: float | None = None
    """Of one request alone: wall time of a step behind the prompt's. As all below."""

    weight_bytes: int | None = None
    """What a step reads of the weights."""

    read_bandwidth_gb_s: float | None = None
    """What the machine reads in a second, 10^9 bytes: the mean of before the run and behind it."""

    step_over_floor: float | None = None
    """A step's time over that of reading the weights once."""


def throughput(
    model: BenchModel = DEMO,
    cell: Cells = None,
    device: options.Device = "cpu",
    dtype: options.Dtype = "bfloat16",
    threads: options.Threads = None,
    quantization: Quantization = "none",
    pipeline_depth: options.PipelineDepth = None,
    repeat: Repeat = 1,
    seed: Seed = 0,
    stdin: Stdin = False,
    as_json: options.Json = False,
) -> None:
    """Generate random prompts' full outputs through scheduler and worker, and tell tokens/s.

    Greedy, prompts of random ids that are new to the prefix cache, all requests of a cell there
    at once. It starts and stops its own processes, which with --stdin share its process group.
    """
    if quantization not in {"none", "int8", "int4"}:
        raise CliError(
            f"quantization is {quantization!r}, must be none, int8 or int4", ExitStatus.USAGE
        )
    if stdin and cell:
        raise CliError("cells come from --cell or from --stdin, not from both", ExitStatus.USAGE)
    cells = [Cell.parse(text) for text in cell or _DEFAULT_CELLS]
    flags = {
        "device": device,
        "dtype": dtype,
        "threads": threads,
        "quantization": quantization,
        "pipeline_depth": pipeline_depth,
    }
    bench = _Bench(resolve(model), flags, seed)
    if stdin:
        asyncio.run(bench.answer_cells(input_lines(sys.stdin.fileno())))
        return
    results = asyncio.run(bench.run_cells(cells, repeat))
    if as_json:
        for result in results:
            _write(result)
    else:
        Console().print(_table(results))


class _Bench:
    """Runs cells on a server of its own."""

    def __init__(self, model: Model, flags: Mapping[str, object], seed: int) -> None:
        self._model = model
        self._flags = flags
        self._seed = seed
        self._num_runs = 0
        self._vocab_size = 0

    async def run_cells(self, cells: Sequence[Cell], repeat: int) -> list[Result]:
        """Return the median run of each cell, each after a short run that does not count."""
        async with local_server(self._model, self._flags) as client:
            await self._warm_up(client)
            results = []
            for cell in cells:
                await self._run(client, _short(cell))
                before = await self._floor(cell)
                runs = [await self._run(client, cell) for _ in range(repeat)]
                runs.sort(key=lambda run: run.wall_s)
                median = runs[len(runs) // 2]
                results.append(_with_floors(median, before, await self._floor(cell)))
            return results

    async def answer_cells(self, lines: AsyncIterator[str]) -> None:
        """Say that the server is ready, then answer each cell with one line, until the lines end.

        What is no cell, or more than the server takes, is answered with the error, and the server
        stays up for the next.

        The server's programs are in this process's group, so that stopping that stops them all.
        """
        started_s = time.perf_counter()
        async with local_server(self._model, self._flags, own_groups=False) as client:
            ready_s = time.perf_counter() - started_s
            await self._warm_up(client)
            _emit({"ready": True, "peer": "pagemill", "ready_s": round(ready_s, 3), **self._flags})
            async for line in lines:
                if not line.strip():
                    continue
                try:
                    run = await self._run(client, Cell.parse(line))
                except (CliError, InvalidArgumentError) as error:
                    _emit({"cell": line.strip(), "error": str(error)})
                    continue
                # The names that other engines' scripts have for the same.
                _emit({**_fields(run), "cell": line.strip(), "out_tok_s": run.output_tok_s})

    async def _warm_up(self, client: AsyncClient) -> None:
        self._vocab_size = (await client.model_info()).vocab_size
        for cell in _WARM_UP:
            await self._run(client, cell)

    async def _run(self, client: AsyncClient, cell: Cell) -> Result:
        """Run a cell once, with prompts that no run before it had."""
        self._num_runs += 1
        prompts = cell.prompts(self._seed * 1000 + self._num_runs, self._vocab_size)
        steps_before = (await client.load()).totals.steps
        load = OtherLoad()
        started_s = time.perf_counter()
        # Not a TaskGroup: the first failure is raised as it is, for the one line that tells it.
        done = await asyncio.gather(
            *(_complete(client, prompt, cell.output_len) for prompt in prompts)
        )
        wall_s = time.perf_counter() - started_s
        other_cpu = load.cores()
        steps = (await client.load()).totals.steps - steps_before
        num_tokens = sum(len(completion.token_ids) for completion in done)
        return Result(
            cell=str(cell),
            output_tok_s=num_tokens / wall_s,
            total_tok_s=(num_tokens + cell.num_requests * cell.input_len) / wall_s,
            wall_s=wall_s,
            mean_step_ms=1000 * wall_s / max(1, steps),
            steps=steps,
            ttft_s=sum(completion.timing.ttft_s for completion in done) / len(done),
            complete=num_tokens == cell.output_tokens,
            other_cpu=other_cpu,
            decode_step_ms=_decode_step_ms(cell, done),
        )

    async def _floor(self, cell: Cell) -> ReadFloor | None:
        """Return what reading the weights once takes now, where a cell has one row."""
        if cell.num_requests > 1 or cell.output_len < 2 or self._flags["device"] != "cpu":
            return None
        return await read_floor(self._model.path, self._flags)


def _with_floors(run: Result, before: ReadFloor | None, behind: ReadFloor | None) -> Result:
    """Add what reading the weights once takes: the memory of some machines changes its speed."""
    if before is None or behind is None or run.decode_step_ms is None:
        return run
    bandwidth_gb_s = (before.read_bandwidth_gb_s + behind.read_bandwidth_gb_s) / 2
    floor = ReadFloor(before.weight_bytes, bandwidth_gb_s)
    fields = asdict(run) | {
        "weight_bytes": floor.weight_bytes,
        "read_bandwidth_gb_s": bandwidth_gb_s,
        "step_over_floor": run.decode_step_ms / floor.step_ms,
    }
    return Result(**fields)


async def _complete(client: AsyncClient, prompt: Sequence[int], output_len: int) -> Completion:
    return await client.complete(
        prompt=prompt,
        max_tokens=output_len,
        temperature=0.0,
        ignore_eos=True,
        omit_text=True,
        min_interval_s=_MIN_INTERVAL_S,
    )


def _decode_step_ms(cell: Cell, done: Sequence[Completion]) -> float | None:
    """Return a step's time behind the prompt's, where a request ran alone."""
    if cell.num_requests > 1 or cell.output_len < 2:
        return None
    timing = done[0].timing
    return 1000 * (timing.total_s - timing.ttft_s) / (cell.output_len - 1)


def _short(cell: Cell) -> Cell:
    """Return a run of the same batch that brings a server to speed."""
    return Cell(cell.num_requests, min(16, cell.input_len), min(4, cell.output_len))


def _write(result: Result) -> None:
    _emit(_fields(result))


def _fields(result: Result) -> dict[str, object]:
    """Return what there is to say, with as many digits as mean something."""
    return {
        name: round(value, 4) if isinstance(value, float) else value
        for name, value in asdict(result).items()
        if value is not None or name == "other_cpu"
    }


def _emit(fields: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def _table(results: Iterable[Result]) -> Table:
    table = Table(title="Tokens per second over gRPC", title_style="")
    for name in ("cell", "output tok/s", "total tok/s", "wall s", "mean step ms"):
        table.add_column(name, justify="left" if name == "cell" else "right")
    for result in results:
        table.add_row(
            result.cell,
            f"{result.output_tok_s:.1f}",
            f"{result.total_tok_s:.1f}",
            f"{result.wall_s:.3f}",
            f"{result.mean_step_ms:.2f}",
        )
    return table
