"""Area a of the public cases: the block pool."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from cases.conftest import Reference
from cases.stack import NUM_BLOCKS, Stack, serving
from cases.table_llama import successors_of
from pagemill.client import Delta
from scheduler_svc.core.block_hash import BlockHash, PoolIdentity
from scheduler_svc.core.hash_algorithms import SHA256

X, Y = list(range(10, 18)), list(range(100, 116))


async def test_case_A_02_a_reused_block_is_unreachable_under_its_old_name(
    bench_r: Path, reference: Reference
) -> None:
    async with serving(bench_r, num_blocks=4, max_model_len=64) as stack:
        pool = stack.scheduler.pool
        assert pool is not None
        replies = [
            await stack.client.complete(prompt=prompt, temperature=0, max_tokens=1, ignore_eos=True)
            for prompt in (X, Y, X)
        ]
        # Y needed all four blocks.
        assert len({block for row in stack.steps[1] for block in row.blocks}) == 4
        assert [reply.usage.cached_tokens for reply in replies] == [0, 0, 0]
        assert list(replies[2].token_ids) == reference(X, 1)

        # What each block holds, as the worker wrote it last: X in the third request's blocks, Y in
        # what it left alone of the second's.
        content: dict[int, list[int]] = {}
        for prompt, (row,) in zip((X, Y, X), stack.steps, strict=True):
            for place, block in enumerate(row.blocks):
                content[block] = prompt[: 4 * place + 4]
        names = {
            block: _name(stack, tokens) for block, tokens in content.items() if len(tokens) % 4 == 0
        }
        assert {name: block for block, name in names.items()}.items() >= pool._index.items()
        overwritten = {_name(stack, Y[: 4 * n + 4]) for n in range(4)} - {*names.values()}
        assert overwritten
        assert not overwritten & pool._index.keys()
        assert len(pool._index) == 4
        await stack.idle()


def _name(stack: Stack, prefix: list[int]) -> BlockHash:
    """Return the name of a prefix's last block, computed from nothing but the tokens."""
    facts = stack.workers[-1].host.model
    group = facts.kv_groups[0]
    layout = f"{group.num_layers}x{group.num_kv_heads}x{group.head_dim}w0"
    root = SHA256.root("", PoolIdentity(facts.fingerprint, facts.kv_dtype, 4, layout))
    tokens = memoryview(b"".join(token.to_bytes(4, "little") for token in prefix)).cast("i")
    return SHA256.hash_full_blocks(tokens, 4, root)[-1]


@pytest.mark.parametrize(
    "settings",
    [{}, {"enable_prefix_caching": False}, {"long_prefill_token_threshold": 1}],
    ids=["cache", "no-cache", "chunk-1"],
)
@pytest.mark.parametrize(
    "count", [60, pytest.param(300, marks=pytest.mark.slow)], ids=["60", "300"]
)
async def test_case_A_03_nothing_is_held_when_all_is_over(
    bench_t: Path, settings: dict[str, Any], count: int
) -> None:
    rng = random.Random(7)
    prefixes = [[rng.randrange(200) for _ in range(40)] for _ in range(4)]
    seen: list[tuple[int, int]] = []
    async with serving(
        bench_t, max_num_seqs=8, max_num_batched_tokens=16, max_model_len=128, **settings
    ) as stack:
        pool = stack.scheduler.pool
        assert pool is not None
        stack.engine._after_turn = lambda _now: seen.append((pool.num_used, pool.num_free))

        async def send(prompt: list[int], most: int, n: int, leave_at: int | None) -> None:
            received: list[list[int]] = [[] for _ in range(n)]
            events = stack.client.generate(
                prompt=prompt, temperature=0, max_tokens=most, n=n, ignore_eos=True
            )
            async for event in events:
                if isinstance(event, Delta):
                    received[event.sequence_index] += event.token_ids
                if leave_at is not None and sum(map(len, received)) >= leave_at:
                    break
            await events.aclose()
            for tokens in received:
                assert tokens == successors_of(prompt[-1], most)[: len(tokens)]
                assert leave_at is not None or len(tokens) == most

        sends = []
        for _ in range(count):
            prompt = rng.choice(prefixes)[: rng.randint(1, 40)]
            max_tokens, n = rng.randint(1, 30), rng.choice([1, 2, 3])
            cancel_after = rng.randint(0, 10) if rng.random() < 0.25 else None
            sends.append(send(prompt, max_tokens, n, cancel_after))
        await asyncio.gather(*sends)

        await stack.idle()
        assert len(pool._index) <= NUM_BLOCKS
        assert seen
        assert all(0 <= used <= NUM_BLOCKS and 0 <= free <= NUM_BLOCKS for used, free in seen)
        # The audit: every block can be had, each once. The case counts a null block with them.
        blocks = pool.allocate(NUM_BLOCKS)
        assert len({0, *blocks}) == 65
        pool.release(blocks)
        assert pool.num_free == NUM_BLOCKS
