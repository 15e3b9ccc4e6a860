"""`python -m scheduler_svc.simulate`, which is `pagemill simulate`."""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from scheduler_svc.simulate.options import Options, read_options
from scheduler_svc.simulate.progress_bar import ProgressBar
from scheduler_svc.simulate.replay import make_load, replay
from scheduler_svc.simulate.report import Percentiles, Report
from scheduler_svc.simulate.step_cost import StepCost
from scheduler_svc.simulate.workload import TraceError

DONE, IMPOSSIBLE = 0, 2

# The published shares of the pool that hold tokens. Source: arXiv:2309.06180, Figure 2.
_PUBLISHED = {"max": 0.204, "pow2": 0.268, "oracle": 0.382, "paged": 0.963}


def main(argv: Sequence[str] | None = None) -> int:
    """Replay what the command line says, print the report, and return the exit status."""
    options = read_options(sys.argv[1:] if argv is None else argv)
    try:
        load = make_load(options)
    except TraceError as error:
        sys.stderr.write(f"pagemill simulate: {error}\n")
        return IMPOSSIBLE
    cost = StepCost()
    started_s = time.perf_counter()
    if sys.stderr.isatty():
        bar = ProgressBar(sys.stderr)
        report = replay(options, load, cost, bar.show)
        bar.wipe()
    else:
        report = replay(options, load, cost)
    wall_s = time.perf_counter() - started_s
    if options.as_json:
        sys.stdout.write(json.dumps(_object(options, report, cost, wall_s)) + "\n")
    else:
        sys.stdout.writelines(f"{line}\n" for line in _table(options, report, wall_s))
    return DONE


def _object(options: Options, report: Report, cost: StepCost, wall_s: float) -> dict[str, object]:
    return {
        "allocator": options.allocator,
        "lengths": options.lengths,
        "trace": None if options.trace is None else str(options.trace),
        "block_size": options.block_size,
        "n": options.n,
        "beam_width": options.beam_width,
        "slots": options.slots,
        "seed": options.seed,
        **asdict(report),
        "step_cost": asdict(cost),
        "wall_s": wall_s,
    }


def _table(options: Options, report: Report, wall_s: float) -> Iterator[str]:
    lines = [*_lines(options, report, wall_s)]
    width = max(len(name) for name, _ in lines)
    return (f"{name:{width}}  {value}" for name, value in lines)


def _lines(options: Options, report: Report, wall_s: float) -> Iterator[tuple[str, str]]:
    memory = f", blocks of {options.block_size}" if options.allocator == "paged" else ""
    several = f" of {options.n} sequences" if options.n > 1 else ""
    several = f" of {options.beam_width} beams" if options.beam_width else several
    yield "allocator", f"{options.allocator}, {options.slots} slots{memory}"
    ended = f"{report.requests} of {options.lengths or options.trace}{several}"
    yield "requests", ended + (f", {report.refused} refused" if report.refused else "")
    published = f" (published: {_PUBLISHED[options.allocator]:.1%})"
    is_figure = options.lengths == "sharegpt" and not several
    yield "utilisation of pool", f"{report.utilisation_of_pool:.1%}{published * is_figure}"
    yield "utilisation of allocated", f"{report.utilisation_of_allocated:.1%}"
    yield "mean batch", f"{report.mean_batch:.2f}"
    yield "blocks saved by sharing", f"{report.blocks_saved_share:.1%}"
    yield "prefix hit rate", f"{report.hit_rate:.1%}"
    yield "preemptions", f"{report.preemptions}, {report.recomputed_tokens} tokens recomputed"
    yield "pauses", f"{report.pauses} rows for a step each"
    yield "time to first token", _percentiles(report.ttft_s)
    yield "time between tokens", _percentiles(report.itl_s)
    yield "throughput", f"{report.generation_tokens_per_s:.1f} generated tokens/s"
    speed = report.virtual_s / wall_s
    yield "virtual time", f"{report.virtual_s:.1f} s in {report.steps} steps, {speed:.0f} x real"


def _percentiles(times: Percentiles) -> str:
    return f"p50 {times.p50:.3f} s, p90 {times.p90:.3f} s, p99 {times.p99:.3f} s"


if __name__ == "__main__":
    sys.exit(main())
