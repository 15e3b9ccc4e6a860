"""An engine behind a real worker listener on loopback."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from grpc import aio

from fake_worker_process import WireWorker
from scheduler_svc.core.block_hash import HashAlgorithm
from scheduler_svc.core.hash_algorithms import SHA256
from scheduler_svc.core.limits import Limits
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.service.adapter_desk import AdapterDesk
from scheduler_svc.service.engine import Engine
from scheduler_svc.service.group_events import Mailbox
from scheduler_svc.service.worker_group import JoinTerms, WorkerGroup
from scheduler_svc.service.worker_servicer import add_worker_servicer

BLOCK_SIZE = 4
NUM_BLOCKS = 64
PROMPT = [0, 1, 2, 0, 1, 1, 2]


class WorkerListener:
    """An engine that workers can dial in to."""

    def __init__(
        self,
        *,
        depth: int,
        heartbeat_s: float,
        join_secret: str,
        hash_algorithm: HashAlgorithm,
        hash_seed: str,
        tensor_parallel_size: int,
    ) -> None:
        limits = Limits(
            block_size=BLOCK_SIZE,
            max_num_seqs=4,
            max_num_batched_tokens=16,
            max_model_len=128,
            max_waiting_requests=64,
            pipeline_depth=depth,
        )
        terms = JoinTerms(
            block_size=BLOCK_SIZE,
            max_num_seqs=4,
            max_num_batched_tokens=16,
            max_model_len=128,
            pipeline_depth=depth,
            heartbeat_s=heartbeat_s,
            vocab_size=3,
            join_secret=join_secret,
            tensor_parallel_size=tensor_parallel_size,
            max_adapters=2,
        )
        mailbox = Mailbox()
        self.adapters = AdapterDesk(2)
        self.scheduler = Scheduler(limits, hash_algorithm=hash_algorithm)
        self.group = WorkerGroup(
            terms,
            mailbox,
            incarnation=2**63 + 1,
            hash_algorithm=hash_algorithm,
            hash_seed=hash_seed,
            adapters=self.adapters,
        )
        self.engine = Engine(
            self.scheduler, self.group, mailbox, incarnation=2**63 + 1, worker_wait_s=30.0
        )
        self.address = ""

    def ready(self) -> bool:
        return bool(self.engine.serving)

    def lost(self) -> bool:
        return not self.engine.serving


@asynccontextmanager
async def listening(
    *,
    depth: int = 2,
    heartbeat_s: float = 30.0,
    join_secret: str = "",
    hash_algorithm: HashAlgorithm = SHA256,
    hash_seed: str = "",
    tensor_parallel_size: int = 1,
) -> AsyncIterator[WorkerListener]:
    listener = WorkerListener(
        depth=depth,
        heartbeat_s=heartbeat_s,
        join_secret=join_secret,
        hash_algorithm=hash_algorithm,
        hash_seed=hash_seed,
        tensor_parallel_size=tensor_parallel_size,
    )
    server = aio.server()
    add_worker_servicer(server, listener.group)
    listener.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    loop = asyncio.create_task(listener.engine.run())
    try:
        await server.start()
        yield listener
    finally:
        loop.cancel()
        with suppress(asyncio.CancelledError):
            await loop
        await server.stop(None)


def fake_worker() -> WireWorker:
    return WireWorker(BLOCK_SIZE, NUM_BLOCKS)
