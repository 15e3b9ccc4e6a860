"""Drafts by prompt lookup change no token of the real model, and are counted."""

import asyncio

from e2e.conftest import NUM_TOKENS, PROMPTS
from e2e.serving import serving
from pagemill.client import AsyncClient, Completion

# A text that the model goes on repeating.
REPETITIVE = "The cat sat on the mat. " * 12
FLAGS = ("--speculation", "prompt-lookup", "--num-speculative-tokens", "4")


async def complete(client: AsyncClient, prompt: str, temperature: float = 0.0) -> Completion:
    return await client.complete(
        prompt=prompt, max_tokens=NUM_TOKENS, temperature=temperature, seed=5, ignore_eos=True
    )


async def answers(*flags: str) -> tuple[list[Completion], list[Completion]]:
    with serving("demo", *flags) as served:
        async with AsyncClient(served.address) as client:
            alone = [
                await complete(client, REPETITIVE),
                await complete(client, REPETITIVE, temperature=0.8),
            ]
            together = await asyncio.gather(
                complete(client, REPETITIVE), *(complete(client, prompt) for prompt in PROMPTS)
            )
    return alone, together


async def test_drafts_save_steps_and_change_no_token() -> None:
    plain, plain_together = await answers()
    alone, together = await answers(*FLAGS)
    assert [each.token_ids for each in alone] == [each.token_ids for each in plain]
    assert [each.token_ids for each in together] == [each.token_ids for each in plain_together]
    usage = alone[0].usage
    assert usage.draft_tokens > 0
    assert usage.accepted_draft_tokens > NUM_TOKENS // 2
    assert {each.usage.draft_tokens for each in plain} == {0}
