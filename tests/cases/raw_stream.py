"""A generation as its messages come over the wire, for what the client's events do not show."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

from grpc import aio

from pagemill.client import GenerateArguments, wire
from pagemill.v1.inference_pb2 import GenerateResponse
from pagemill.v1.inference_pb2_grpc import InferenceStub


@asynccontextmanager
async def raw_call(
    address: str, timeout_s: float = 60.0, **arguments: Any
) -> AsyncIterator["aio.UnaryStreamCall[Any, GenerateResponse]"]:
    """Begin a generation with the client's arguments, and yield the call."""
    request = wire.generate_request(cast("GenerateArguments", arguments))
    async with aio.insecure_channel(address) as channel:
        yield InferenceStub(channel).Generate(request, timeout=timeout_s)


async def messages(address: str, **arguments: Any) -> list[GenerateResponse]:
    """Return all messages of a generation."""
    async with raw_call(address, **arguments) as call:
        return [message async for message in call]
