"""In float32, greedy tokens equal those of `transformers`, however requests are batched."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.conftest import NUM_TOKENS, PROMPTS
from e2e.serving import Served, serving
from pagemill.client import AsyncClient, Completion

Oracle = dict[str, list[int]]


async def complete(client: AsyncClient, prompt: str, delay_s: float = 0.0) -> Completion:
    await asyncio.sleep(delay_s)
    return await client.complete(
        prompt=prompt, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True
    )


def ids(completion: Completion) -> list[int]:
    return list(completion.token_ids)


@pytest.fixture(scope="module")
def demo() -> Iterator[Served]:
    with serving("demo") as served:
        yield served


async def test_alone_and_from_the_cache(demo: Served, oracle: Oracle) -> None:
    hits = []
    async with AsyncClient(demo.address) as client:
        for prompt in PROMPTS:
            first = await complete(client, prompt)
            again = await complete(client, prompt)
            assert ids(first) == ids(again) == oracle[prompt]
            assert first.finish_reason == "length"
            whole_blocks = (first.usage.prompt_tokens - 1) // 16 * 16
            assert again.usage.cached_tokens == whole_blocks
            hits.append(again.usage.cached_tokens)
            assert again.text == first.text == await client.detokenize(oracle[prompt])
    assert max(hits) >= 32


async def test_sixteen_at_once_in_random_order(demo: Served, oracle: Oracle) -> None:
    load = list(PROMPTS) * 2
    random.Random(3).shuffle(load)
    delays = random.Random(4)
    async with AsyncClient(demo.address) as client:
        completions = await asyncio.gather(
            *(complete(client, prompt, delays.uniform(0, 0.5)) for prompt in load)
        )
        state = await client.load()
    for prompt, completion in zip(load, completions, strict=True):
        assert ids(completion) == oracle[prompt]
    assert (state.running, state.waiting, state.used_blocks) == (0, 0, 0)


@pytest.mark.parametrize(
    "flags",
    [
        ("--max-num-batched-tokens", "32"),
        ("--pipeline-depth", "1"),
        ("--no-enable-prefix-caching",),
    ],
    ids=lambda flags: flags[0],
)
async def test_all_at_once_under(flags: tuple[str, ...], oracle: Oracle) -> None:
    with serving("demo", *flags) as served:
        async with AsyncClient(served.address) as client:
            completions = await asyncio.gather(*(complete(client, prompt) for prompt in PROMPTS))
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert ids(completion) == oracle[prompt]


async def test_a_pool_so_small_that_requests_are_preempted(oracle: Oracle) -> None:
    with serving("demo", "--num-gpu-blocks-override", "12") as served:
        async with AsyncClient(served.address) as client:
            completions = await asyncio.gather(*(complete(client, prompt) for prompt in PROMPTS))
            totals = (await client.load()).totals
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert ids(completion) == oracle[prompt]
    assert totals.preemptions > 0


async def test_through_a_unix_socket(socket_path: Path, oracle: Oracle) -> None:
    with serving("demo", listen=f"unix:{socket_path}") as served:
        assert served.address == f"unix:{socket_path}"
        async with AsyncClient(served.address) as client:
            completions = await asyncio.gather(*(complete(client, prompt) for prompt in PROMPTS))
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert ids(completion) == oracle[prompt]
