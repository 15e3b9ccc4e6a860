"""Gemma 3 270M, served: tokens are those of `transformers`, also behind its windows of 512."""

import asyncio
from pathlib import Path

import pytest

from e2e.serving import serving
from pagemill.client import AsyncClient
from scheduler_svc.service.text.tokenizer import Tokenizer
from transformers_oracle import greedy, load_gemma

pytestmark = pytest.mark.slow

NUM_TOKENS = 24
FRANCE = "The capital of France is"
PROMPTS = (
    FRANCE,
    "def fibonacci(n):\n    ",
    "Die Hauptstadt von Deutschland heißt",
    # Longer than a window, so that blocks are given back.
    " ".join(f"{number} and {number} make {number + number}." for number in range(90)),
)


@pytest.fixture(scope="module")
def gemma_oracle(gemma_gguf: Path) -> dict[str, list[int]]:
    """Greedy continuations by `transformers` in float32, of the ids that our tokenizer gives."""
    tokenizer = Tokenizer.from_path(gemma_gguf)
    model = load_gemma(gemma_gguf)
    prompts = {prompt: tokenizer.encode(prompt) for prompt in PROMPTS}
    assert len(prompts[PROMPTS[-1]]) > 2 * 512
    return {prompt: greedy(model, ids, NUM_TOKENS) for prompt, ids in prompts.items()}


@pytest.mark.parametrize("flags", [(), ("--max-num-batched-tokens", "200")], ids=["whole", "cut"])
async def test_tokens_are_those_of_transformers(
    flags: tuple[str, ...], gemma_oracle: dict[str, list[int]]
) -> None:
    with serving("demo-gemma", "--max-model-len", "2048", *flags) as served:
        async with AsyncClient(served.address) as client:
            completions = await asyncio.gather(
                *(
                    client.complete(
                        prompt=prompt, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True
                    )
                    for prompt in PROMPTS
                )
            )
            state = await client.load()
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert list(completion.token_ids) == gemma_oracle[prompt]
    assert state.used_blocks == 0


async def test_france_has_a_capital_in_bfloat16_too() -> None:
    with serving("demo-gemma", "--max-model-len", "512", "--dtype", "bfloat16") as served:
        async with AsyncClient(served.address) as client:
            completion = await client.complete(prompt=FRANCE, max_tokens=24, temperature=0.0)
            question = "Q: What is the capital of France?\nA:"
            answer = await client.complete(prompt=question, max_tokens=8, temperature=0.0)
    assert "France" in completion.text
    assert "Paris" in answer.text
