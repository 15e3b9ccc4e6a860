"""`pagemill bench`: the engine over gRPC against the bare forward loop, and its other parts."""

import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from pagemill.cli import options, single_program
from pagemill.cli.bare_loop import BareLoop, bare_loop
from pagemill.cli.bench_hash import bench_hash
from pagemill.cli.bench_kv_quality import kv_quality
from pagemill.cli.bench_throughput import throughput
from pagemill.cli.exit_status import CliError
from pagemill.cli.local_server import local_server
from pagemill.cli.model_source import DEMO, Model, resolve
from pagemill.cli.program_settings import arguments, program
from pagemill.client import AsyncClient, StepTimes

NumSeqs = Annotated[int, typer.Option(min=1, help="Sequences at once.")]
InputLen = Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")]
OutputLen = Annotated[int, typer.Option(min=1, help="Tokens generated for each.")]
Pairs = Annotated[int, typer.Option(min=1, help="Pairs of runs.")]
BenchModel = Annotated[str, typer.Argument(metavar="MODEL", help="As for serve.")]

app = typer.Typer(help="Measure.", no_args_is_help=True)
app.command("hash")(bench_hash)
app.command("throughput")(throughput)
app.command("kv-quality")(kv_quality)
app.command("step", context_settings=single_program.PASS_ON)(single_program.bench_step)
app.command("kernels", context_settings=single_program.PASS_ON)(single_program.bench_kernels)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What both sides run: greedy, to full length, all there from the start."""

    num_seqs: int
    """Sequences."""

    input_len: int
    """Tokens of each prompt."""

    output_len: int
    """Tokens generated for each."""

    num_pairs: int
    """Runs of each side."""

    @property
    def output_tokens(self) -> int:
        """Tokens that a run generates."""
        return self.num_seqs * self.output_len

    def prompts(self, number: int, vocab_size: int) -> list[list[int]]:
        """Return the prompts of one pair: equal for both sides, new to the prefix cache."""
        draw = random.Random(number)  # noqa: S311 reproducible, not secret
        return [
            [draw.randrange(vocab_size) for _ in range(self.input_len)]
            for _ in range(self.num_seqs)
        ]


@dataclass(frozen=True, slots=True)
class Pair:
    """One run of each side, one after the other."""

    engine_s: float
    """Wall time over gRPC, from the first request to the last summary."""

    bare_s: float
    """Wall time of the bare loop."""

    steps: int
    """Steps of the engine."""


@dataclass(frozen=True, slots=True)
class Overhead:
    """What `--json` prints. Medians over the pairs."""

    engine_tok_s: float
    """Generated tokens per second over gRPC."""

    bare_tok_s: float
    """Generated tokens per second of the bare loop."""

    ratio: float
    """Engine over bare: the median of the pairs' ratios, in which drift cancels out."""

    overhead_ms_per_step: float
    """The engine's own cost: what a mean step takes, from one result to the next, less the time
    in which the worker executes it."""

    wall_ms_per_step: float
    """The engine's wall time less the bare loop's, per step of the engine. Besides the own cost,
    this holds what scheduler and clients take from a worker on the same cores, and all noise."""

    rounds: list[dict[str, float]]
    """The pairs, in order."""


@app.command("overhead")
def overhead(
    model: BenchModel = DEMO,
    device: options.Device = "cpu",
    dtype: options.Dtype = "float32",
    threads: options.Threads = None,
    pipeline_depth: options.PipelineDepth = None,
    num_seqs: NumSeqs = 16,
    input_len: InputLen = 32,
    output_len: OutputLen = 64,
    pairs: Pairs = 6,
    as_json: options.Json = False,
) -> None:
    """Compare tokens per second of the engine over gRPC with those of a bare forward loop.

    Both load the model into a process of their own and take turns (A B, B A ...), so that a
    machine that grows warmer or busier weighs on both.
    """
    workload = Workload(
        num_seqs=num_seqs, input_len=input_len, output_len=output_len, num_pairs=pairs
    )
    flags = {"device": device, "dtype": dtype, "threads": threads}
    pairs_run, steps = asyncio.run(
        _measure(resolve(model), flags, {"pipeline_depth": pipeline_depth}, workload)
    )
    result = summarize(pairs_run, steps, workload)
    if as_json:
        sys.stdout.write(json.dumps(asdict(result)) + "\n")
    else:
        Console().print(_table(result))


async def _measure(
    model: Model,
    worker_flags: Mapping[str, object],
    scheduler_flags: Mapping[str, object],
    workload: Workload,
) -> tuple[list[Pair], StepTimes]:
    # Room for every sequence, and the same on both sides whatever memory says.
    tokens = workload.input_len + workload.output_len
    blocks = workload.num_seqs * (tokens // 16 + 1)
    worker_flags = {**worker_flags, "num_gpu_blocks_override": blocks}
    command = program("worker_svc", str(model.path), "--bench-forward", *arguments(worker_flags))
    async with (
        local_server(model, {**worker_flags, **scheduler_flags}) as client,
        bare_loop(command) as bare,
    ):
        vocab_size = (await client.model_info()).vocab_size
        pairs = []
        # The first pair warms both sides up, and is not counted.
        for number in range(workload.num_pairs + 1):
            prompts = workload.prompts(number, vocab_size)
            pairs.append(await _pair(client, bare, workload, prompts, engine_first=number % 2 == 0))
        steps = (await client.load()).recent_steps
        if steps is None:
            raise CliError("the server tells nothing of its steps")
        return pairs[1:], steps


async def _pair(
    client: AsyncClient,
    bare: BareLoop,
    workload: Workload,
    prompts: Sequence[Sequence[int]],
    *,
    engine_first: bool,
) -> Pair:
    if engine_first:
        engine_s, steps = await _run_engine(client, workload, prompts)
        return Pair(engine_s, await _run_bare(bare, workload, prompts), steps)
    bare_s = await _run_bare(bare, workload, prompts)
    engine_s, steps = await _run_engine(client, workload, prompts)
    return Pair(engine_s, bare_s, steps)


async def _run_engine(
    client: AsyncClient, workload: Workload, prompts: Sequence[Sequence[int]]
) -> tuple[float, int]:
    """Return the wall time of a run, and its steps."""
    before = (await client.load()).totals.steps
    started_s = time.perf_counter()
    # Not a TaskGroup: the first failure is raised as it is, for the one line that tells it.
    await asyncio.gather(
        *(
            client.complete(
                prompt=prompt,
                max_tokens=workload.output_len,
                temperature=0.0,
                ignore_eos=True,
                omit_text=True,
            )
            for prompt in prompts
        )
    )
    wall_s = time.perf_counter() - started_s
    return wall_s, (await client.load()).totals.steps - before


async def _run_bare(bare: BareLoop, workload: Workload, prompts: Sequence[Sequence[int]]) -> float:
    """Return the wall time of a run."""
    answer = await bare.run(
        {
            "num_seqs": workload.num_seqs,
            "input_len": workload.input_len,
            "output_len": workload.output_len,
            "prompts": prompts,
        }
    )
    return float(answer["wall_s"])


def summarize(pairs: Sequence[Pair], steps: StepTimes, workload: Workload) -> Overhead:
    """Return the medians of some pairs, and what the engine says of its latest steps."""
    tokens = workload.output_tokens
    return Overhead(
        engine_tok_s=statistics.median(tokens / pair.engine_s for pair in pairs),
        bare_tok_s=statistics.median(tokens / pair.bare_s for pair in pairs),
        ratio=statistics.median(pair.bare_s / pair.engine_s for pair in pairs),
        overhead_ms_per_step=1000 * (steps.step_s - steps.model_s),
        wall_ms_per_step=statistics.median(
            1000 * (pair.engine_s - pair.bare_s) / pair.steps for pair in pairs
        ),
        rounds=[asdict(pair) for pair in pairs],
    )


def _table(result: Overhead) -> Table:
    table = Table(title="The engine over gRPC against the bare loop", title_style="")
    table.add_column("")
    table.add_column("median", justify="right")
    table.add_row("engine", f"{result.engine_tok_s:.1f} tokens/s")
    table.add_row("bare loop", f"{result.bare_tok_s:.1f} tokens/s")
    table.add_row("ratio", f"{result.ratio:.3f}")
    table.add_row("engine's own cost", f"{result.overhead_ms_per_step:.3f} ms per step")
    table.add_row("difference in wall time", f"{result.wall_ms_per_step:.3f} ms per step")
    return table
