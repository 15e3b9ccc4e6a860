"""How tests use an engine's door: submit, read to the end, wait for a state."""

import asyncio
import time
from array import array
from collections.abc import Callable

from scheduler_svc.core.beam_options import BeamOptions
from scheduler_svc.core.request import FinishReason, Sampling
from scheduler_svc.service.engine_door import (
    Account,
    EngineDoor,
    Finish,
    Submission,
    TokenStream,
)


def submission(
    request_id: str,
    prompt: list[int],
    max_output_tokens: int | None = 8,
    *,
    deadline_ns: int | None = None,
    tenant: str = "",
    num_sequences: int = 1,
    beam: BeamOptions | None = None,
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
        num_sequences=num_sequences,
        beam=beam,
    )


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


async def read_all(stream: TokenStream) -> tuple[dict[int, list[int]], dict[int, Finish], Account]:
    """Return each sequence's tokens and end, and the account, reading to the end."""
    tokens: dict[int, list[int]] = {}
    ends: dict[int, Finish] = {}
    async for batch in stream:
        for gain in batch.gains:
            assert gain.sequence_index not in ends, "a sequence gained behind its end"
            tokens.setdefault(gain.sequence_index, []).extend(gain.token_ids)
            if gain.finish is not None:
                ends[gain.sequence_index] = gain.finish
        if batch.account is not None:
            return tokens, ends, batch.account
    raise AssertionError("a stream ended without its account")


async def read(stream: TokenStream) -> tuple[list[int], Finish, Account]:
    """Return tokens, end and account of a stream with one sequence."""
    tokens, ends, account = await read_all(stream)
    assert list(ends) == [0]
    return tokens[0], ends[0], account


async def ask(door: EngineDoor, request_id: str, prompt: list[int], count: int) -> list[int]:
    """Return the tokens of a request that ends by its own bound."""
    async with door.open(submission(request_id, prompt, count)) as stream:
        tokens, finish, account = await read(stream)
    assert finish.reason is FinishReason.LENGTH
    assert account.num_output_tokens == len(tokens) == count
    return tokens
