"""What a test makes of a server's answers."""

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable, Iterator, Sequence

import pytest
from grpc import aio

from pagemill.v1.inference_pb2 import GenerateResponse


def text_of(responses: Sequence[GenerateResponse]) -> str:
    """Return the text of an output."""
    return "".join(delta.text for response in responses for delta in response.deltas)


def ids_of(responses: Sequence[GenerateResponse]) -> list[int]:
    """Return the token ids of an output."""
    return [id_ for response in responses for delta in response.deltas for id_ in delta.token_ids]


async def refusal_of(call: Awaitable[object] | AsyncIterable[object]) -> aio.AioRpcError:
    """Wait for a call to fail, and return how."""
    try:
        if isinstance(call, AsyncIterable):
            async for _ in call:
                pass
        else:
            await call
    except aio.AioRpcError as error:
        return error
    pytest.fail("the call went well")


def deadlines(first_s: float, reached: Callable[[], bool]) -> Iterator[float]:
    """Yield seconds for a call that must run out of time, until one came as far as it should.

    A machine that stalls may use up a short time on the way; the next is four times as long.
    """
    for factor in (1, 4, 16, 64):
        yield first_s * factor
        if reached():
            return
    pytest.fail("no call came as far in its time")


async def eventually(claim: Callable[[], bool], within_s: float = 5.0) -> None:
    """Wait until a claim holds."""
    async with asyncio.timeout(within_s):
        while not claim():
            await asyncio.sleep(0.01)
