"""A beam search is silent until its end, which brings every hypothesis, over the real scheduler."""

import asyncio
from array import array

import pytest

from engine_bench import NUM_BLOCKS, Bench, running
from engine_door_use import ask, read_all, submission, until
from fake_worker import generate_alone, search_alone
from scheduler_svc.core.beam_options import BeamOptions
from scheduler_svc.core.errors import InvalidRequestError
from scheduler_svc.core.request import FinishReason, RequestKey, Stopping
from scheduler_svc.service.engine_door import Submission

PROMPT = [0, 1, 2, 0, 1]
COUNT = 10
BEAMS = BeamOptions(width=3, num_returned=2)


def searching(beam: BeamOptions = BEAMS) -> Submission:
    return submission("beams", PROMPT, COUNT, beam=beam)


@pytest.mark.parametrize("depth", [1, 2])
async def test_the_last_batch_has_all_hypotheses_the_best_first(depth: int) -> None:
    async with running(Bench(depth=depth)) as bench:
        async with bench.door.open(searching()) as stream:
            other = asyncio.create_task(ask(bench.door, "other", [2], 20))
            (batch,) = [batch async for batch in stream]
        assert await other == generate_alone([2], 20, frozenset())
        assert bench.holds_nothing()
    expected = search_alone(PROMPT, BEAMS, Stopping(COUNT), COUNT)
    assert len(expected) == 2
    for index, (gain, hypothesis) in enumerate(zip(batch.gains, expected, strict=True)):
        assert (gain.sequence_index, gain.token_ids) == (index, hypothesis.tokens)
        assert gain.finish is not None
        assert gain.finish.reason is hypothesis.reason
        assert gain.finish.score == pytest.approx(hypothesis.score)
        assert gain.finish.cumulative_logprob == pytest.approx(hypothesis.cumulative_logprob)
    account = batch.account
    assert account is not None
    assert account.num_prompt_tokens == len(PROMPT)
    assert account.num_output_tokens == sum(len(each.tokens) for each in expected)
    assert account.first_token_ns is not None
    assert account.finished_ns is not None
    assert account.first_token_ns < account.finished_ns


@pytest.mark.parametrize("steps", [0, 1, 4])
async def test_an_abort_ends_every_hypothesis_with_no_token(steps: int) -> None:
    async with running(Bench()) as bench:
        bench.group.eager = False
        async with bench.door.open(searching()) as stream:
            for _ in range(steps):
                await until(lambda: bool(bench.group.plans))
                bench.group.answer()
            await until(lambda: len(bench.records) == steps)
            assert bench.door.abort("", ["beams"]) == (["beams"], [])
            assert bench.holds_nothing()
            tokens, ends, account = await read_all(stream)
    assert tokens == {0: [], 1: []}
    assert [ends[index].reason for index in range(2)] == [FinishReason.ABORT] * 2
    assert account.num_output_tokens == 0


@pytest.mark.parametrize("kept_cache", [True, False])
async def test_a_lost_worker_does_not_change_what_is_found(*, kept_cache: bool) -> None:
    async with running(Bench()) as bench:
        bench.group.eager = False
        async with bench.door.open(searching()) as stream:
            for _ in range(4):
                await until(lambda: bool(bench.group.plans))
                bench.group.answer()
            await until(lambda: len(bench.records) == 4)
            bench.group.leave()
            await until(lambda: not bench.engine.serving)
            bench.group.eager = True
            bench.group.join(NUM_BLOCKS, kept_cache=kept_cache)
            tokens, _, account = await read_all(stream)
        assert bench.holds_nothing()
    expected = search_alone(PROMPT, BEAMS, Stopping(COUNT), COUNT)
    assert [array("i", tokens[index]) for index in range(2)] == [
        array("i", each.tokens) for each in expected
    ]
    assert account.num_preemptions == 1


async def test_a_row_that_fails_ends_the_search_with_its_reason() -> None:
    async with running(Bench()) as bench:
        bench.group.eager = False
        async with bench.door.open(searching()) as stream:
            for failing in (frozenset[int](), frozenset({0})):
                await until(lambda: bool(bench.group.plans))
                plan = bench.group.plans.popleft()
                bench.group.give(bench.group.worker.run(plan, failing))
            _, ends, _ = await read_all(stream)
        assert bench.holds_nothing()
    assert [(ends[index].reason, ends[index].error) for index in range(2)] == [
        (FinishReason.ERROR, "planted")
    ] * 2


async def test_a_width_above_the_rows_never_reaches_the_queue() -> None:
    async with running(Bench()) as bench:
        with pytest.raises(InvalidRequestError) as refused:
            async with bench.door.open(searching(BeamOptions(width=5))):
                pytest.fail("it was let in")
        assert refused.value.field == "beam.width"
        assert bench.scheduler.num_waiting == 0


async def test_a_step_counts_every_beam_it_answers_and_names_their_request() -> None:
    async with running(Bench()) as bench, bench.door.open(searching()) as stream:
        await read_all(stream)
    sampled = [record.num_sampled for record in bench.records if record.num_sampled]
    assert sampled == [1] + [BEAMS.width] * (COUNT - 1)
    named = {record.request_keys for record in bench.records if record.num_sampled}
    assert named == {(RequestKey("", "beams"),)}
