"""Area c of the public cases: scheduling."""

import asyncio
import time
from pathlib import Path

import pytest

from cases.conftest import Reference
from cases.raw_stream import messages
from cases.stack import RanRow, Stack, held, serving
from cases.table_llama import successors_of
from pagemill.client import InvalidArgumentError as InvalidArgument
from scheduler_svc.core.departure import preempt
from scheduler_svc.core.step_plan import StepPlan


async def test_case_C_01_a_prompt_larger_than_the_pool_is_refused_at_once(bench_t: Path) -> None:
    async with serving(bench_t, num_blocks=8, max_model_len=64) as stack:
        begin = time.monotonic()
        with pytest.raises(InvalidArgument, match=r"40.*32"):
            await stack.client.complete(prompt=[1] * 40, temperature=0, max_tokens=4)
        assert time.monotonic() - begin < 3
        small = await stack.client.complete(prompt=[1] * 5, temperature=0, max_tokens=4)
        assert list(small.token_ids) == successors_of(1, 4)
        load = await stack.idle()
        assert load.total_blocks == 8
        whole = await stack.client.complete(prompt=[1] * 32, temperature=0, max_tokens=1)
        assert list(whole.token_ids) == [2]
        await stack.idle()


@pytest.mark.parametrize("budget", [64, 2])
@pytest.mark.parametrize("evicted", [False, True])
async def test_case_C_03_a_resumed_request_runs_exactly_what_its_hit_leaves(
    bench_r: Path,
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
    evicted: bool,
    budget: int,
) -> None:
    prompt, hit = list(range(30, 38)), 8 if evicted else 12
    async with serving(
        bench_r, num_blocks=8, pipeline_depth=1, max_num_batched_tokens=budget
    ) as stack:
        plan_step, stopped_at = stack.scheduler.schedule, list[int]()

        def preempt_once(now_ns: int) -> StepPlan | None:
            if stack.scheduler.counters.generation_tokens == 5 and not stopped_at:
                _preempt_the_only_one(stack, now_ns, evicted)
                stopped_at.append(len(stack.steps))
            return plan_step(now_ns)

        monkeypatch.setattr(stack.scheduler, "schedule", preempt_once)
        reply = await stack.client.complete(
            prompt=prompt, temperature=0, max_tokens=10, ignore_eos=True
        )
        before, resumed = stack.steps[: stopped_at[0]], stack.steps[stopped_at[0] :]
        # 13 tokens were known, and keys and values written for 12.
        assert before[-1][0].end == 12
        # One slot is written for each token that runs.
        chunks = [1] * (13 - hit) if budget == 2 else [13 - hit]
        if budget == 2 and evicted:
            chunks = [2, 2, 1]
        assert [row.num_new for (row,) in resumed[: len(chunks)]] == chunks
        assert [row.num_computed for (row,) in resumed[:1]] == [hit]
        # Whether a row samples is a matter of its positions, though it has produced tokens.
        sampled = [row.sampled for (row,) in resumed[: len(chunks)]]
        assert sampled == [False] * (len(chunks) - 1) + [True]
        assert list(reply.token_ids) == reference(prompt, 10)
        assert reply.timing.preemptions == 1
        await stack.idle()


def _preempt_the_only_one(stack: Stack, now_ns: int, evicted: bool) -> None:
    state, pool = stack.scheduler._state, stack.scheduler.pool
    (request,) = state.live.values()
    assert pool is not None
    third = request.blocks[2]
    preempt(state, request, now_ns)
    assert (request.num_tokens, pool.num_free, pool.num_idle_cached) == (13, 8, 3)
    if evicted:
        pool.retract(third)


STEPS_TO_FIRST = {7: 1, 8: 1, 9: 2, 16: 2, 17: 3, 24: 3}


async def test_case_C_07_a_token_comes_with_the_last_chunk_and_never_before(bench_t: Path) -> None:
    prompts = {length: [length] * length for length in STEPS_TO_FIRST}
    ones = [[201], [202]]
    async with serving(bench_t, max_num_batched_tokens=8, max_num_seqs=8) as stack:
        for length, prompt in prompts.items():
            begin = len(stack.steps)
            await _three_tokens(stack, prompt)
            (first, *_) = (
                n for n, (row,) in enumerate(stack.steps[begin:], start=1) if row.sampled
            )
            assert first == STEPS_TO_FIRST[length]
        await stack.client.complete(prompt=[0], max_tokens=1)
        stack.scheduler.flush_cache()
        together = len(stack.steps)
        with held(stack):
            sends = [
                asyncio.create_task(_three_tokens(stack, prompt))
                for prompt in [*prompts.values(), *ones]
            ]
            while stack.engine.num_live < 8:
                await asyncio.sleep(0.002)
        await asyncio.gather(*sends)
        assert max(len(step) for step in stack.steps[together:]) > 1

        begin = len(stack.steps)
        await _three_tokens(stack, [24] * 16 + [90, 91, 92, 93])
        (row,) = stack.steps[begin]
        assert (row.num_computed, row.num_new, row.sampled) == (16, 4, True)
        assert [row.num_new for (row,) in stack.steps[begin + 1 :]] == [1, 1]

        for step in stack.steps:
            assert 1 <= sum(row.num_new for row in step) <= 8
            assert all(row.sampled == _reaches_its_end(row) for row in step)
        for plan in stack.workers[0].host.plans:
            assert all(row.num_new_tokens >= 1 for row in plan.admitted)
        await stack.idle()


def _reaches_its_end(row: RanRow) -> bool:
    return row.end == row.num_tokens


async def _three_tokens(stack: Stack, prompt: list[int]) -> None:
    """Send a prompt, and check ids and form of what comes."""
    accepted, *later = await messages(
        stack.address, prompt=prompt, temperature=0, max_tokens=3, ignore_eos=True
    )
    assert (accepted.HasField("accepted"), len(accepted.deltas)) == (True, 0)
    got = [list(message.deltas[0].token_ids) if message.deltas else [] for message in later]
    assert [token for tokens in got for token in tokens] == successors_of(prompt[-1], 3)
    # The last alone may be without a token: it has the account.
    assert all(got[:-1])
    assert later[-1].HasField("summary")
