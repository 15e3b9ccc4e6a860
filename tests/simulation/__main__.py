"""Runs simulated worlds: one again, by its seed, or many until they have made enough steps."""

import argparse
import os
import sys
import time
import traceback
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from simulation.driver import Summary, simulate

REPORT_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class Failure:
    """A world in which something was not as it must be."""

    seed: int
    num_steps: int
    check_every: int
    report: str

    @property
    def command(self) -> str:
        """The line that runs it again."""
        python = os.path.relpath(sys.executable)
        return (
            f"PYTHONPATH=.:proto:clients:tests {python} -m simulation --seed {self.seed} "
            f"--steps {self.num_steps} --check-every {self.check_every}"
        )


def run_seed(seed: int, num_steps: int, check_every: int) -> Summary | Failure:
    """Run one world. Whatever it raises is a failure of that seed."""
    try:
        return simulate(seed, num_steps, check_every)
    except Exception:  # noqa: BLE001 - the outermost frame of a world: any error is its outcome
        return Failure(seed, num_steps, check_every, traceback.format_exc())


def run_many(
    first_seed: int, total_steps: int, num_steps: int, check_every: int, num_processes: int
) -> Iterator[Summary | Failure]:
    """Yield the outcomes of seed after seed, until all steps together are enough."""
    done = 0
    outcomes = _outcomes(first_seed, num_steps, check_every, num_processes)
    while done < total_steps:
        outcome = next(outcomes)
        done += outcome.num_steps
        yield outcome
        if isinstance(outcome, Failure):
            break
    outcomes.close()


def _outcomes(
    first_seed: int, num_steps: int, check_every: int, num_processes: int
) -> Generator[Summary | Failure, None, None]:
    """Yield without end; with several processes, nearly in order."""
    seeds = count(first_seed)
    if num_processes == 1:
        for seed in seeds:
            yield run_seed(seed, num_steps, check_every)
    flying: set[Future[Summary | Failure]] = set()
    with ProcessPoolExecutor(num_processes) as pool:
        try:
            while True:
                while len(flying) < 4 * num_processes:
                    flying.add(pool.submit(run_seed, next(seeds), num_steps, check_every))
                ready, flying = wait(flying, return_when=FIRST_COMPLETED)
                for each in ready:
                    yield each.result()
        finally:
            pool.shutdown(cancel_futures=True)


class Progress:
    """Counts what ran, and says so now and then."""

    def __init__(self, total_steps: int) -> None:
        self.summaries: list[Summary] = []
        self.num_steps = 0
        self._total = total_steps
        self._began = self._told = time.monotonic()

    def note(self, summary: Summary) -> None:
        self.summaries.append(summary)
        self.num_steps += summary.num_steps
        now = time.monotonic()
        if now - self._told >= REPORT_EVERY_S or self.num_steps >= self._total:
            self._told = now
            self.tell()

    def tell(self) -> None:
        seeds = [each.seed for each in self.summaries]
        pace = self.num_steps / max(1e-9, time.monotonic() - self._began)
        print(
            f"seeds {min(seeds)}..{max(seeds)}: {self.num_steps:,} of {self._total:,} steps, "
            f"{pace:,.0f} steps/s, {self._sum('num_events'):,} events, "
            f"{self._sum('num_jobs'):,} requests, {self._sum('num_tokens'):,} tokens, "
            f"{self._sum('num_preemptions'):,} preemptions, "
            f"{self._sum('num_copies'):,} copied blocks",
            flush=True,
        )

    def _sum(self, name: str) -> int:
        return sum(getattr(each, name) for each in self.summaries)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0, or 1 with the line that repeats the first failure."""
    options = _parse(arguments)
    if options.seed is not None:
        outcome = run_seed(options.seed, options.steps, options.check_every)
        print(outcome.report if isinstance(outcome, Failure) else outcome)
        return int(isinstance(outcome, Failure))
    progress = Progress(options.total_steps)
    for outcome in run_many(
        options.first_seed,
        options.total_steps,
        options.steps,
        options.check_every,
        options.processes,
    ):
        if isinstance(outcome, Failure):
            print(outcome.report)
            print(f"Again: {outcome.command}")
            return 1
        progress.note(outcome)
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=Path(__file__).parent.name, description=__doc__)
    parser.add_argument("--seed", type=int, help="run this world alone")
    parser.add_argument("--steps", type=int, default=500, help="steps of a world")
    parser.add_argument("--total-steps", type=int, default=1_000_000, help="of all worlds")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--check-every", type=int, default=16, help="steps between full checks")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
