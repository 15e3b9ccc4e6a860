"""A reader gets all its tokens in order, in one batch what piled up, and one clear end."""

import asyncio

import pytest

from engine_bench import Bench, running
from engine_door_use import ask, read, submission, until
from fake_worker import generate_alone
from scheduler_svc.core.errors import SlowReaderError
from scheduler_svc.core.request import FinishReason
from scheduler_svc.service import token_stream


async def test_a_reader_gets_in_one_batch_what_piled_up() -> None:
    async with running(Bench()) as bench, bench.door.open(submission("r", [1], 9)) as stream:
        await until(lambda: not bench.scheduler.has_work)
        batches = [batch async for batch in stream]
    assert [len(gain.token_ids) for batch in batches for gain in batch.gains] == [9]
    assert batches[0].account is not None


async def test_a_rest_ends_with_the_sequence_or_with_its_time() -> None:
    async with running(Bench()) as bench:
        bench.group.eager = False
        async with bench.door.open(submission("r", [1], 100)) as stream:
            async with asyncio.timeout(5):
                await stream.rest(0.01)
            resting = asyncio.create_task(stream.rest(60))
            await asyncio.sleep(0)
            bench.door.abort("", ["r"])
            async with asyncio.timeout(5):
                await resting
                await stream.rest(60)
            _, finish, _ = await read(stream)
    assert finish.reason is FinishReason.ABORT


async def test_a_slow_reader_loses_its_request_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(token_stream, "MAX_PILED_TOKENS", 20)
    slow = submission("slow", [1], 100)
    async with running(Bench()) as bench, bench.door.open(slow) as stream:
        await until(lambda: not bench.scheduler.has_work)
        assert await ask(bench.door, "fast", [2], 30) == generate_alone([2], 30, frozenset())
        with pytest.raises(SlowReaderError, match="more than 20 tokens"):
            await read(stream)
        assert bench.holds_nothing()


async def test_a_stop_string_cuts_the_output() -> None:
    async with running(Bench()) as bench:
        bench.group.eager = False
        async with bench.door.open(submission("r", [1], 100)) as stream:
            for _ in range(4):
                await until(lambda: bool(bench.group.plans))
                bench.group.answer()
            await until(lambda: len(bench.records) == 4)
            stream.finish(0, 2)
            assert bench.holds_nothing()
            tokens, finish, account = await read(stream)
    assert (tokens, finish.reason, account.num_output_tokens) == ([], FinishReason.STOP, 2)
    assert stream.account() == account


async def test_a_stop_string_wins_over_an_end_that_nobody_has_read() -> None:
    async with running(Bench()) as bench, bench.door.open(submission("r", [1], 4)) as stream:
        await until(lambda: not bench.scheduler.has_work)
        stream.finish(0, 3)
        _, finish, account = await read(stream)
        assert (finish.reason, account.num_output_tokens) == (FinishReason.STOP, 3)
        stream.finish(0, 1)
        assert stream.account().num_output_tokens == 3


async def test_a_last_token_that_is_one_too_many_is_no_orderly_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(token_stream, "MAX_PILED_TOKENS", 7)
    async with running(Bench()) as bench, bench.door.open(submission("slow", [1], 8)) as stream:
        await until(lambda: not bench.scheduler.has_work)
        with pytest.raises(SlowReaderError):
            await read(stream)
