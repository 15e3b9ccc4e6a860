"""Ranks of a group as threads of a test, which meet at a store in memory."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from torch._C._distributed_c10d import HashStore

from worker_svc.model.shard import Shard
from worker_svc.service.process_group import ProcessGroup

T = TypeVar("T")

LIMIT_S = 60.0


def on_all_ranks(
    world_size: int, run: Callable[[ProcessGroup], T], given_up: threading.Event | None = None
) -> list[T]:
    """Run a function on every rank at once, and return what each gave, by rank."""
    store = HashStore()
    given_up = given_up or threading.Event()

    def run_rank(rank: int) -> T:
        group = ProcessGroup(Shard(rank, world_size), "cpu")
        group.connect(store, "127.0.0.1", given_up)
        try:
            return run(group)
        finally:
            group.disconnect()

    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(run_rank, rank) for rank in range(world_size)]
        return [future.result(LIMIT_S) for future in futures]
