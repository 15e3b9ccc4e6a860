"""What a test makes of a server's answers."""

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable, Sequence

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


async def eventually(claim: Callable[[], bool], within_s: float = 5.0) -> None:
    """Wait until a claim holds."""
    async with asyncio.timeout(within_s):
        while not claim():
            await asyncio.sleep(0.01)
