"""Area d of the public cases: parallel sampling and beams."""

import asyncio
import time
from pathlib import Path

import pytest

from cases.stack import Stack, held, serving, until
from cases.table_llama import EOS, markov_head, successors_of, uniform_head, write_table_llama
from pagemill.client import Completion, Delta, Event, Finished, FinishReason, Summary
from pagemill.client import InvalidArgumentError as InvalidArgument

PROMPT = [1, 2, 3]


def ids(completion: Completion) -> list[tuple[int, ...]]:
    return [sequence.token_ids for sequence in completion.sequences]


async def test_case_D_01_seeded_sequences_differ_and_come_again(tmp_path: Path) -> None:
    model = write_table_llama(tmp_path / "uniform", uniform_head())
    async with serving(model) as stack:

        async def draw(n: int, seed: int | None = 42) -> Completion:
            return await stack.client.complete(
                prompt=PROMPT, n=n, seed=seed, temperature=1, max_tokens=8, ignore_eos=True
            )

        first, second = await draw(4), await draw(4)
        draws = (draw(4), *(draw(1, seed) for seed in (1, 2, None, 3, 4)))
        # On a busy machine the first would have ended before the last came.
        with held(stack):
            tasks = [asyncio.create_task(each) for each in draws]
            await until(lambda: stack.engine.num_live == len(tasks))
        batched, *_ = await asyncio.gather(*tasks)
        assert max(len(step) for step in stack.steps) == 9
        assert [s.finished.sequence_index for s in first.sequences] == [0, 1, 2, 3]
        assert len(set(ids(first))) == 4
        assert all(len(tokens) == 8 for tokens in ids(first))
        assert ids(second) == ids(first)
        assert ids(batched) == ids(first)
        # docs/sequences.md: a draw is a function of seed, index and position; so this is index 0.
        assert ids(await draw(1)) == ids(first)[:1]
        await stack.idle()


async def test_case_D_01_every_sequence_ends_by_itself_and_the_stream_with_the_last(
    tmp_path: Path,
) -> None:
    rows = {last: {EOS: 0.3, 65: 0.4, 66: 0.3} for last in range(256)}
    model = write_table_llama(tmp_path / "markov", markov_head(rows))
    async with serving(model) as stack:
        lengths = set[int]()
        for seed in range(5):
            events = [
                event
                async for event in stack.client.generate(
                    prompt=PROMPT, n=4, seed=seed, temperature=1, max_tokens=12
                )
            ]
            lengths |= set(_ends_once_each(events))
        assert len(lengths) > 3
        await stack.idle()


def _ends_once_each(events: list[Event]) -> list[int]:
    """Check the ends of a stream of four, and return how many ids each sequence had."""
    counts, ended = [0] * 4, list[int]()
    for event in events:
        match event:
            case Delta():
                assert event.sequence_index not in ended
                counts[event.sequence_index] += len(event.token_ids)
            case Finished():
                assert event.reason in {FinishReason.STOP, FinishReason.LENGTH}
                ended.append(event.sequence_index)
            case _:
                pass
    assert sorted(ended) == [0, 1, 2, 3]
    last = events[-1]
    assert isinstance(last, Summary)
    assert isinstance(events[-2], Finished)
    assert last.usage.prompt_tokens == 3
    assert last.usage.completion_tokens == sum(counts)
    return counts


async def test_case_D_03_more_sequences_than_rows_are_refused_at_once(bench_t: Path) -> None:
    async with serving(bench_t, max_num_seqs=4) as stack:
        begin = time.monotonic()
        with pytest.raises(InvalidArgument, match=r"n is 8.*4"):
            await stack.client.complete(prompt=PROMPT, temperature=0, n=8, max_tokens=5)
        assert time.monotonic() - begin < 3
        reply = await stack.client.complete(prompt=PROMPT, temperature=0, n=4, max_tokens=5)
        assert ids(reply) == [tuple(successors_of(3, 5))] * 4
        await stack.idle()


async def test_case_D_03_a_cancelled_family_is_in_two_further_steps_at_most(bench_t: Path) -> None:
    async with serving(bench_t, max_num_seqs=4, num_blocks=5200, step_s=0.05) as stack:
        for _ in range(5):
            ended = await _cancel_after_three_messages(stack)
            await stack.idle(within_s=3)
            assert len(stack.steps) - ended <= 2


async def test_case_D_03_nothing_grows_over_200_cancelled_families(bench_t: Path) -> None:
    async with serving(bench_t, max_num_seqs=4, num_blocks=5200) as stack:
        for _ in range(20):
            await _cancel_after_three_messages(stack)
        before = _resident_bytes()
        for _ in range(200):
            await _cancel_after_three_messages(stack)
        assert _resident_bytes() - before < 5_000_000
        await stack.idle()


async def _cancel_after_three_messages(stack: Stack) -> int:
    """Return how many steps had ended when the call was cancelled."""
    stack.workers[0].host.steps.clear()
    stack.workers[0].host.plans.clear()
    events = stack.client.generate(prompt=PROMPT, temperature=0, n=4, max_tokens=5000)
    for _ in range(3):
        await anext(events)
    # What has not begun by now is planned already, or must not be.
    with held(stack):
        ended = len(stack.steps)
        await events.aclose()
        await until(lambda: not stack.scheduler.has_work, within_s=3)
    return ended


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096
