"""Worker processes without a model that form a group of several ranks, over real gRPC."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress

from grpc import aio

from fake_worker import FakeWorker
from fake_worker_process import Connection, dialled, hello

PORT = 4711
"""Where rank 0 says it waits."""


@asynccontextmanager
async def alive(connection: Connection) -> AsyncIterator[Connection]:
    """Send heartbeats, and note what comes, while the block lasts."""
    tasks = [
        asyncio.create_task(connection.heartbeats()),
        asyncio.create_task(connection.listen()),
    ]
    try:
        yield connection
    finally:
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError, aio.AioRpcError, asyncio.InvalidStateError):
                await task


async def meet(connections: Sequence[Connection]) -> set[str]:
    """Have all ranks say that they have loaded; return where they are told to meet."""
    ranks = [connection.ack.rank for connection in connections]
    assert sorted(ranks) == list(range(len(ranks)))
    return set(
        await asyncio.gather(*(each.meet(0 if each.ack.rank else PORT) for each in connections))
    )


@asynccontextmanager
async def working_ranks(
    address: str, worker: FakeWorker, boot_ids: Sequence[int], num_blocks: Sequence[int] = ()
) -> AsyncIterator[list[Connection]]:
    """Join as a whole group; rank 0 answers plans. Yields the connections by rank."""
    async with AsyncExitStack() as stack:
        connections = [
            await stack.enter_async_context(dialled(address, hello(boot_id=boot_id)))
            for boot_id in boot_ids
        ]
        connections.sort(key=lambda connection: connection.ack.rank)
        await meet(connections)
        sizes = num_blocks or [worker.num_blocks] * len(connections)
        for connection, size in zip(connections, sizes, strict=True):
            await connection.ready(size)
            await stack.enter_async_context(alive(connection))
        work = asyncio.create_task(connections[0].work(worker))
        try:
            yield connections
        finally:
            work.cancel()
            with suppress(asyncio.CancelledError, aio.AioRpcError, asyncio.InvalidStateError):
                await work
