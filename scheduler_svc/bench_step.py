"""`python -m scheduler_svc.bench_step`, which is `pagemill bench step`: what a step costs here.

Steady decode: every row gains a token a step, none comes or goes, two plans are in flight.
"""

import argparse
import json
import statistics
import sys
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from scheduler_svc.core.block_hash import PoolIdentity
from scheduler_svc.core.hash_algorithms import SHA256
from scheduler_svc.core.limits import Limits
from scheduler_svc.core.request import Request, Sampling, Stopping
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step_plan import StepPlan, StepResult
from scheduler_svc.service.worker_wire import Epoch, encode_plan

BLOCK_SIZE = 16
# The mean of this many consecutive steps sees every row gain a block once.
WINDOW = BLOCK_SIZE
_NUM_WINDOWS = 24
_WARM_UP_STEPS = 2 * WINDOW
_SHORTEST_PROMPT = 64
_MAX_LEN = _SHORTEST_PROMPT + BLOCK_SIZE + _WARM_UP_STEPS + (_NUM_WINDOWS + 1) * WINDOW
_DEPTH = 2


@dataclass(frozen=True, slots=True)
class StepCosts:
    """One line of `--json`."""

    requests: int
    """Rows that decode."""

    us_per_step: float
    """`schedule` and `apply` together: the median over the windows of their means. Processor time,
    so that other processes weigh less; neither of the two ever waits."""

    us_per_request: float
    """The same, for one row."""

    plan_bytes: float
    """Encoded plan, mean of the latest 16 steps."""

    plan_bytes_max: int
    """The largest of the measured plans."""


def measure(num_requests: int) -> StepCosts:
    """Time steady steps of so many rows, whose lengths are spread evenly over a block."""
    scheduler = _decoding(num_requests)
    window_us, sizes = [], []
    for _ in range(_NUM_WINDOWS):
        spent_ns, plans = _run(scheduler, num_requests, WINDOW)
        window_us.append(spent_ns / WINDOW / 1000)
        # Traces of a step add 60 bytes to one plan in a hundred, and are not counted.
        sizes += [len(encode_plan(plan, Epoch(2**64 - 1, 1), "")) for plan in plans]
    us_per_step = statistics.median(window_us)
    return StepCosts(
        requests=num_requests,
        us_per_step=us_per_step,
        us_per_request=us_per_step / num_requests,
        plan_bytes=statistics.fmean(sizes[-WINDOW:]),
        plan_bytes_max=max(sizes),
    )


def _decoding(num_requests: int) -> Scheduler:
    """Return a scheduler past its first steps, with a plan in flight."""
    limits = Limits(
        block_size=BLOCK_SIZE,
        max_num_seqs=num_requests,
        max_num_batched_tokens=num_requests * _MAX_LEN,
        max_model_len=_MAX_LEN,
        max_waiting_requests=num_requests,
        pipeline_depth=_DEPTH,
    )
    scheduler = Scheduler(limits)
    root = SHA256.root("", PoolIdentity("", "", BLOCK_SIZE, ""))
    scheduler.start_epoch(num_requests * (_MAX_LEN // BLOCK_SIZE + 1), root, 0)
    for number in range(num_requests):
        # Ids of its own, so that no two share a block.
        prompt = array("i", [number]) * (_SHORTEST_PROMPT + number % BLOCK_SIZE)
        stopping = Stopping(max_output_tokens=None, eos_token_ids=frozenset({num_requests}))
        scheduler.add(Request(str(number), prompt, Sampling(temperature=0.0), stopping), 0)
    scheduler.schedule(0)
    _run(scheduler, num_requests, _WARM_UP_STEPS)
    return scheduler


def _run(scheduler: Scheduler, num_requests: int, num_steps: int) -> tuple[int, list[StepPlan]]:
    """Plan the next step and apply the one before, so often; return the time of both."""
    tokens = np.arange(num_requests, dtype=np.int32)
    plans, spent_ns = [], 0
    for _ in range(num_steps):
        started_ns = time.thread_time_ns()
        plan = scheduler.schedule(started_ns)
        spent_ns += time.thread_time_ns() - started_ns
        if plan is None or plan.num_rows != num_requests:
            raise RuntimeError(f"{num_requests} requests do not decode steadily")
        plans.append(plan)
        result = StepResult(plan.step_id - 1, tokens)
        started_ns = time.thread_time_ns()
        scheduler.apply(result, started_ns)
        spent_ns += time.thread_time_ns() - started_ns
    return spent_ns, plans


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the sizes of the command line, and print a line for each."""
    parser = argparse.ArgumentParser(prog="pagemill bench step", description=__doc__)
    parser.add_argument(
        "--requests",
        type=int,
        action="append",
        metavar="N",
        help="Rows that decode, at least 1. Repeatable. Default: 256 and 1024.",
    )
    parser.add_argument("--json", action="store_true", help="Print one JSON object a line.")
    options = parser.parse_args(argv)
    sizes: list[int] = options.requests or [256, 1024]
    if min(sizes) < 1:
        parser.error(f"--requests is {min(sizes)}, must be at least 1")
    for size in sizes:
        costs = measure(size)
        sys.stdout.writelines(
            f"{line}\n" for line in ([json.dumps(asdict(costs))] if options.json else _say(costs))
        )
        sys.stdout.flush()
    return 0


def _say(costs: StepCosts) -> Iterator[str]:
    yield (
        f"{costs.requests} requests: {costs.us_per_step:.1f} us a step, "
        f"{costs.us_per_request:.3f} us a request; plan of {costs.plan_bytes:.0f} bytes on the "
        f"mean, {costs.plan_bytes_max} at most"
    )


if __name__ == "__main__":
    sys.exit(main())
