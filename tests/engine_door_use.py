"""How tests use an engine's door: submit, read to the end, wait for a state."""

import asyncio
import time
from array import array
from collections.abc import Callable

from scheduler_svc.core.request import FinishReason, Sampling
from scheduler_svc.service.engine_door import EngineDoor, Finish, Submission, TokenStream


def submission(
    request_id: str,
    prompt: list[int],
    max_output_tokens: int | None = 8,
    *,
    deadline_ns: int | None = None,
    tenant: str = "",
) -> Submission:
    return Submission(
        request_id=request_id,
        tenant=tenant,
        token_ids=array("i", prompt),
        sampling=Sampling(temperature=0.0, seed=7),
        max_output_tokens=max_output_tokens,
        min_output_tokens=0,
        eos_token_ids=frozenset(),
        stop_token_ids=frozenset(),
        salt=b"",
        read_cache=True,
        priority=0,
        deadline_ns=deadline_ns,
        arrival_ns=time.monotonic_ns(),
        traceparent="",
    )


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


async def read(stream: TokenStream) -> tuple[list[int], Finish]:
    tokens: list[int] = []
    async for batch in stream:
        tokens += batch.token_ids
        if batch.finish is not None:
            return tokens, batch.finish
    raise AssertionError("a stream ended without its finish")


async def ask(door: EngineDoor, request_id: str, prompt: list[int], count: int) -> list[int]:
    """Return the tokens of a request that ends by its own bound."""
    async with door.open(submission(request_id, prompt, count)) as stream:
        tokens, finish = await read(stream)
    assert finish.reason is FinishReason.LENGTH
    assert finish.account.num_output_tokens == len(tokens) == count
    return tokens
