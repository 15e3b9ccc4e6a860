"""Embeddings in place of tokens over the whole product: the same tokens, shared by content."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cases.conftest import Reference
from cases.stack import Stack, held, serving, until
from pagemill.client import EmbeddingSpan, InvalidArgumentError, ResourceExhaustedError
from pagemill.client.async_client import AsyncClient
from pagemill.client.retry import RetryPolicy
from tiny_llama import HIDDEN, IMG, tiny_weights

PROMPT = list(range(40, 64))
TABLE = tiny_weights(0)["model.embed_tokens.weight"]


def rows(start: int, end: int, content_id: str = "table") -> EmbeddingSpan:
    """The table's own rows for a part of the prompt."""
    return EmbeddingSpan(start, content_id, TABLE[PROMPT[start:end]].numpy().tobytes())


def noise(seed: int, content_id: str, start: int = 3, count: int = 10) -> EmbeddingSpan:
    vectors = np.random.default_rng(seed).normal(size=(count, HIDDEN)).astype("<f4")
    return EmbeddingSpan(start, content_id, vectors.tobytes())


async def send(
    stack: Stack, *spans: EmbeddingSpan, prompt: list[int] = PROMPT, count: int = 8
) -> tuple[int, list[int]]:
    """Return cached tokens and the output; the prompt has placeholders under the spans."""
    filled = list(prompt)
    for span in spans:
        end = span.offset + len(span.embeddings) // (4 * HIDDEN)
        filled[span.offset : end] = [IMG] * (end - span.offset)
    reply = await stack.client.complete(
        prompt=filled, temperature=0, max_tokens=count, ignore_eos=True, embeddings=spans
    )
    return reply.usage.cached_tokens, list(reply.token_ids)


@pytest.mark.parametrize("budget", [5, 64])
async def test_the_tables_own_rows_give_the_tokens_of_the_ids(
    bench_r: Path, reference: Reference, budget: int
) -> None:
    expected = reference(PROMPT, 8)
    async with serving(bench_r, max_num_batched_tokens=budget, max_num_seqs=4) as stack:
        assert await send(stack) == (0, expected)
        assert await send(stack, rows(0, 24)) == (0, expected)
        assert await send(stack, rows(2, 9, "one"), rows(9, 17, "two")) == (0, expected)
        # Found again from the second span on, inside it, and where the tokens are behind it.
        assert await send(stack, rows(2, 9, "one"), rows(9, 17, "two")) == (20, expected)
        await stack.idle()


async def test_content_is_shared_where_id_and_embeddings_are_equal(bench_r: Path) -> None:
    async with serving(bench_r) as stack:
        cold, first = await send(stack, noise(1, "cat"))
        assert cold == 0
        assert await send(stack, noise(1, "cat")) == (20, first)
        # Before the span begins in its first block there is nothing to share but nothing is wrong.
        cached, second = await send(stack, noise(2, "dog"))
        assert (cached, second != first) == (0, True)
        # A wrong id gives no wrong tokens.
        assert await send(stack, noise(2, "cat")) == (0, second)
        # One position further it is another block, though equal ids lie in it.
        moved, _ = await send(stack, noise(1, "cat", start=2))
        assert moved == 0
        await stack.idle()


async def test_a_preempted_request_sends_them_again(bench_r: Path, reference: Reference) -> None:
    prompts = [[n, *PROMPT[1:]] for n in range(70, 76)]
    async with serving(bench_r, num_blocks=24, max_num_batched_tokens=7, max_num_seqs=6) as stack:
        with held(stack):
            tasks = [
                asyncio.create_task(send(stack, rows(1, 20, f"r{n}"), prompt=prompt, count=24))
                for n, prompt in enumerate(prompts)
            ]
            await until(lambda: stack.engine.num_live == 6)
        outputs = [(await task)[1] for task in tasks]
        assert outputs == [reference(prompt, 24) for prompt in prompts]
        assert (await stack.idle()).totals.preemptions > 0
        spans = [row.embeddings for plan in stack.workers[-1].host.plans for row in plan.admitted]
        # A row that comes back behind a hit gets only what is left.
        assert {len(each) for each in spans} <= {0, 1}
        assert any(each and each[0].offset > 1 for each in spans)


async def test_a_worker_that_is_lost_in_the_middle_of_a_span_loses_nothing(
    bench_r: Path, reference: Reference
) -> None:
    async with serving(bench_r, max_num_batched_tokens=4, max_num_seqs=4) as stack:
        with held(stack):
            task = asyncio.create_task(send(stack, rows(0, 24)))
            await until(lambda: stack.scheduler.num_running == 1)
            await stack.stop_worker()
        await stack.add_worker()
        assert (await task)[1] == reference(PROMPT, 8)


async def test_sequences_share_what_they_were_given(bench_r: Path, reference: Reference) -> None:
    async with serving(bench_r) as stack:
        reply = await stack.client.complete(
            prompt=[IMG] * 24,
            temperature=0,
            n=3,
            max_tokens=8,
            ignore_eos=True,
            embeddings=[rows(0, 24)],
        )
        assert [list(each.token_ids) for each in reply.sequences] == [reference(PROMPT, 8)] * 3


def _bytes(values: Any, dtype: str = "<f4") -> bytes:
    return np.asarray(values, dtype=dtype).tobytes()


ONE = _bytes(np.ones(HIDDEN))
BFLOAT16_NAN = torch.full((HIDDEN,), torch.nan, dtype=torch.bfloat16).view(torch.uint8).numpy()


@pytest.mark.parametrize(
    ("spans", "reason"),
    [
        ([EmbeddingSpan(0, "x", ONE[:-1])], r"embeddings\[0\].embeddings has 255 bytes, .* of 256"),
        ([EmbeddingSpan(0, "x", b"")], "has 0 bytes"),
        ([EmbeddingSpan(0, "", ONE)], r"embeddings\[0\].content_id is empty"),
        ([EmbeddingSpan(0, "x" * 257, ONE)], "has 257 bytes, must have at most 256"),
        ([EmbeddingSpan(0, "a\nb", ONE)], "must be printable text"),
        ([EmbeddingSpan(24, "x", ONE)], r"offset is 24, must be in \[0, 23\]"),
        ([EmbeddingSpan(23, "x", ONE * 2)], r"offset is 23, must be in \[0, 22\]"),
        (
            [EmbeddingSpan(4, "x", ONE * 2), EmbeddingSpan(5, "x", ONE)],
            r"embeddings\[1\].offset is 5, must be in \[6, 23\]",
        ),
        ([EmbeddingSpan(0, "x", _bytes([np.nan] * HIDDEN))], "element 0 that is not finite"),
        (
            [EmbeddingSpan(0, "x", _bytes([1] * 63 + [np.inf], "<f2"), "float16")],
            "element 63 that is not finite",
        ),
        ([EmbeddingSpan(0, "x", BFLOAT16_NAN.tobytes(), "bfloat16")], "element 0 that is not"),
        ([EmbeddingSpan(0, "x", ONE)] * 1025, "has 1025 entries, must have at most 1024"),
        ([EmbeddingSpan(0, "x", ONE * 13)], "must have at most 3072: see max_embedding_bytes"),
    ],
)
async def test_what_cannot_be_is_refused_by_field_and_bound(
    bench_r: Path, spans: list[EmbeddingSpan], reason: str
) -> None:
    async with serving(bench_r, join=False, max_embedding_bytes=3072) as stack:
        with pytest.raises(InvalidArgumentError, match=reason):
            await stack.client.complete(prompt=PROMPT, embeddings=spans, timeout=30)


async def test_live_requests_hold_embeddings_within_a_bound(bench_r: Path) -> None:
    async with serving(bench_r, max_embedding_bytes=10_000) as stack:
        with held(stack):
            task = asyncio.create_task(send(stack, rows(0, 24)))
            await until(lambda: stack.engine.num_live == 1)
            async with AsyncClient(stack.address, retry=RetryPolicy(max_attempts=1)) as client:
                with pytest.raises(ResourceExhaustedError, match="more than 10000"):
                    await client.complete(prompt=PROMPT, embeddings=[rows(0, 24)])
        await task
        assert (await send(stack, rows(0, 24)))[0] == 20
