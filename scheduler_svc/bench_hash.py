"""`python -m scheduler_svc.bench_hash`: what naming a block costs, a line for each algorithm."""

import json
import random
import sys
import time
from array import array
from collections.abc import Iterator
from typing import TextIO

from scheduler_svc.core.block_hash import HashAlgorithm, PoolIdentity
from scheduler_svc.core.hash_algorithms import HASH_ALGORITHMS

BLOCK_SIZE = 16
NUM_BLOCKS = 512
NUM_RUNS = 200
VOCAB_SIZE = 151_936


def bench_hash(output: TextIO, num_runs: int = NUM_RUNS) -> None:
    """Write one line for each algorithm.

    A run names all blocks of one prompt. The algorithms take turns, and the fastest run of each
    counts: whatever else the machine does can only slow a run down.
    """
    draw = random.Random(0)  # noqa: S311 reproducible, not secret
    tokens = array("i", (draw.randrange(VOCAB_SIZE) for _ in range(NUM_BLOCKS * BLOCK_SIZE)))
    fastest_ns = dict.fromkeys(HASH_ALGORITHMS, sys.maxsize)
    for _ in range(num_runs):
        for name, took_ns in _round(memoryview(tokens)):
            fastest_ns[name] = min(fastest_ns[name], took_ns)
    for name, took_ns in fastest_ns.items():
        line = {"algorithm": name, "us_per_block": round(took_ns / NUM_BLOCKS / 1000, 4)}
        output.write(json.dumps(line) + "\n")


def _round(tokens: memoryview) -> Iterator[tuple[str, int]]:
    for name, algorithm in HASH_ALGORITHMS.items():
        yield name, _run_ns(algorithm, tokens)


def _run_ns(algorithm: HashAlgorithm, tokens: memoryview) -> int:
    root = algorithm.root("", PoolIdentity("", "", BLOCK_SIZE, ""))
    begin_ns = time.perf_counter_ns()
    algorithm.hash_full_blocks(tokens, BLOCK_SIZE, root)
    return time.perf_counter_ns() - begin_ns


if __name__ == "__main__":
    bench_hash(sys.stdout)
