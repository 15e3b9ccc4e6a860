"""Requests that use any mixture of features get, all at once and in want of blocks, what each gets.

Alone means: one at a time, one plan in flight, no drafts, no shared blocks. At once: drafts, hits,
chunks, preemption, two plans in flight, and callers that go away in the middle.
"""

import asyncio
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cases.stack import Stack, serving
from pagemill.client import Completion, EmbeddingSpan
from pagemill.client.events import PositionLogprobs
from tiny_adapter import write_adapter
from tiny_llama import VOCAB, write_tiny_llama

HIDDEN = 64
ADAPTERS = ("one", "two")
COUNT = 48

Request = dict[str, Any]


def any_request(draw: random.Random) -> Request:
    """Return a request that fits a pool of 144 slots, with each feature now and then."""

    def now_and_then(share: float) -> bool:
        return draw.random() < share

    # Of three texts that repeat themselves: so there are hits, and drafts.
    start, period = draw.choice([(3, 1), (7, 3), (20, 9)])
    repeated = [*range(start, start + period)] * 30
    asked: Request = {
        "prompt": repeated[: draw.choice([1, 2, 16, 30])],
        "max_tokens": draw.choice([1, 8, 24]),
        "temperature": draw.choice([0, 0, 0.05, 1.3]),
        "seed": draw.randrange(5),
        "ignore_eos": now_and_then(0.7),
    }
    if now_and_then(0.4):
        asked["adapter"] = draw.choice(ADAPTERS)
    if now_and_then(0.3):
        asked["max_tokens"] = 40  # long and without rules: here are the drafts
        return asked
    if now_and_then(0.2):
        asked["prompt_logprobs"] = draw.choice([0, 2])
    if now_and_then(0.15):
        asked["echo"] = True
    if len(asked["prompt"]) > 2 and now_and_then(0.2):
        asked["embeddings"] = [any_span(draw, len(asked["prompt"]))]
    if now_and_then(0.15):
        return asked | {"beam_width": draw.choice([2, 3]), "num_returned": 2, "temperature": 0}
    rules: dict[str, tuple[float, Any]] = {
        "n": (0.2, draw.choice([2, 3])),
        "logprobs": (0.4, draw.choice([0, 1, 3])),
        "repetition_penalty": (0.15, draw.choice([0.8, 1.3])),
        "frequency_penalty": (0.15, 1.0),
        "logit_bias": (0.15, {draw.randrange(VOCAB): draw.choice([-100.0, 5.0])}),
        "allowed_token_ids": (0.1, draw.sample(range(VOCAB), 9)),
        "min_tokens": (0.15, draw.randrange(asked["max_tokens"] + 1)),
        "stop_token_ids": (0.15, draw.sample(range(VOCAB), 8)),
        "stop": (0.1, [draw.choice("ea")]),
        "bad_words": (0.1, [draw.choice(["a", "the", "x y"])]),
        "top_k": (0.2, 5),
        "min_p": (0.2, 0.02),
    }
    return asked | {name: value for name, (share, value) in rules.items() if now_and_then(share)}


def any_span(draw: random.Random, num_prompt_tokens: int) -> EmbeddingSpan:
    length = draw.randrange(1, num_prompt_tokens)
    values = np.random.default_rng(draw.randrange(2)).standard_normal((length, HIDDEN)) * 0.1
    offset = draw.randrange(num_prompt_tokens - length + 1)
    return EmbeddingSpan(offset, "picture", values.astype("<f4").tobytes())


Told = list[tuple[int, int, float]]


def told(positions: tuple[PositionLogprobs, ...]) -> Told:
    return [(each.token_id, each.rank, each.logprob) for one in positions for each in one]


def outcome(completion: Completion) -> tuple[list[Any], Told]:
    """Return all that must be equal, and what must be nearly so."""
    sequences = completion.sequences
    said = [(each.token_ids, each.text, each.finished.reason) for each in sequences]
    numbers = told(completion.summary.prompt_logprobs)
    for each in sequences:
        numbers += told(each.logprobs)
    return said, numbers


async def ask(stack: Stack, request: Request) -> tuple[list[Any], Told]:
    return outcome(await stack.client.complete(**request))


async def go_away_after(stack: Stack, request: Request, num_events: int) -> None:
    events = stack.client.generate(**request)
    async for _ in events:
        if (num_events := num_events - 1) < 0:
            break
    await events.aclose()


async def with_adapters(stack: Stack) -> None:
    for name in ADAPTERS:
        await stack.client.load_adapter(name, name)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
async def test_what_a_request_gets_does_not_depend_on_what_else_is_on(
    tmp_path: Path, kv_cache_dtype: str
) -> None:
    model, home, draw = (
        write_tiny_llama(tmp_path / "model"),
        tmp_path / "adapters",
        random.Random(7),
    )
    for seed, name in enumerate(ADAPTERS):
        write_adapter(home / name, seed=seed, rank=2 + seed)
    requests = [any_request(draw) for _ in range(COUNT)]
    both: Request = {"adapter_dir": home, "kv_cache_dtype": kv_cache_dtype}
    plain: Request = {"enable_prefix_caching": False, "pipeline_depth": 1}
    async with serving(model, num_blocks=200, **plain, **both) as stack:
        await with_adapters(stack)
        alone = [await ask(stack, request) for request in requests]

    busy: Request = {
        "speculation": "prompt-lookup",
        "max_num_seqs": 8,
        "max_num_batched_tokens": 40,
    }
    async with serving(model, num_blocks=36, **busy, **both) as stack:
        await with_adapters(stack)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ask(stack, request)) for request in requests]
            for _ in range(9):
                leaving = go_away_after(stack, draw.choice(requests), draw.randrange(3))
                group.create_task(leaving)
        at_once = [task.result() for task in tasks]
        await stack.idle()
        counted = [
            stack.metric(f"pagemill_{name}_total")
            for name in ("preemptions", "accepted_draft_tokens", "prefix_cache_hits")
        ]
    assert all(counted), counted  # else this proves less than it says
    for request, (said, numbers), (also_said, also_numbers) in zip(
        requests, alone, at_once, strict=True
    ):
        assert also_said == said, request
        assert [each[:2] for each in also_numbers] == [each[:2] for each in numbers], request
        assert [each[2] for each in also_numbers] == pytest.approx(
            [each[2] for each in numbers], abs=1e-3
        )
