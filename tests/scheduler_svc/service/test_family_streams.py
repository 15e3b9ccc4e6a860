"""The sequences of a request end alone and are read from one stream, over the real scheduler."""

import asyncio
import time
from dataclasses import replace

import pytest

from engine_bench import NUM_BLOCKS, Bench, running
from engine_door_use import ask, read_all, submission, until
from fake_worker import generate_alone
from scheduler_svc.core.errors import (
    DeadlineError,
    InvalidRequestError,
    NeverFitsError,
    SlowReaderError,
)
from scheduler_svc.core.request import FinishReason, RequestKey
from scheduler_svc.service import token_stream
from scheduler_svc.service.engine_door import Submission

PROMPT = [0, 1, 2, 0, 1]


def alone(index: int, count: int, stop: frozenset[int] = frozenset()) -> list[int]:
    return generate_alone(PROMPT, count, stop, index)


def family(count: int = 10, n: int = 3, **changes: object) -> Submission:
    asked = submission("family", PROMPT, count, num_sequences=n)
    return replace(asked, **changes)  # type: ignore[arg-type]  # the changes are the test's


async def answer(bench: Bench, steps: int) -> None:
    """Run so many steps, and have their tokens handed out."""
    for _ in range(steps):
        await until(lambda: bool(bench.group.plans))
        before = len(bench.records)
        bench.group.answer()
        await until(lambda before=before: len(bench.records) > before)  # type: ignore[misc]


def go_on(bench: Bench) -> None:
    """Run the steps under way, and all that follow as they come."""
    bench.group.eager = True
    while bench.group.plans:
        bench.group.answer()


@pytest.mark.parametrize("depth", [1, 2])
async def test_each_sequence_gets_the_tokens_of_its_index(depth: int) -> None:
    async with running(Bench(depth=depth)) as bench:
        async with bench.door.open(family()) as stream:
            other = asyncio.create_task(ask(bench.door, "other", [2], 20))
            tokens, ends, account = await read_all(stream)
        assert await other == generate_alone([2], 20, frozenset())
        totals = bench.door.load().totals
        assert bench.holds_nothing()
    assert tokens == {index: alone(index, 10) for index in range(3)}
    assert len({tuple(each) for each in tokens.values()}) == 3
    assert {end.reason for end in ends.values()} == {FinishReason.LENGTH}
    assert (account.num_prompt_tokens, account.num_output_tokens) == (len(PROMPT), 30)
    assert totals.prompt_tokens == len(PROMPT) + 1
    assert account.finished_ns is not None
    assert account.first_token_ns is not None
    assert account.arrival_ns < account.first_token_ns < account.finished_ns


async def test_a_sequence_that_stops_is_told_of_while_the_others_run() -> None:
    # The end of a sequence is an id that no other draws so early.
    stop = frozenset({1})
    lengths = [len(alone(index, 30, stop)) for index in range(3)]
    assert len(set(lengths)) > 1, "choose another prompt"
    first, last = lengths.index(min(lengths)), lengths.index(max(lengths))
    async with running(Bench()) as bench:
        bench.group.eager = False
        async with bench.door.open(family(30, stop_token_ids=stop)) as stream:
            await answer(bench, min(lengths))
            batch = await anext(aiter(stream))
            ended = [gain.sequence_index for gain in batch.gains if gain.finish is not None]
            assert first in ended
            assert last not in ended
            assert batch.account is None
            go_on(bench)
            _, ends, account = await read_all(stream)
        assert bench.holds_nothing()
    assert last in ends
    assert first not in ends
    assert ends[last].stop_token_id == 1
    assert account.num_output_tokens == sum(lengths)


async def test_a_stop_string_ends_one_sequence_and_the_others_go_on() -> None:
    async with running(Bench()) as bench:
        bench.group.eager = False
        async with bench.door.open(family()) as stream:
            await answer(bench, 4)
            stream.finish(1, 2)
            go_on(bench)
            tokens, ends, account = await read_all(stream)
        assert bench.holds_nothing()
    assert tokens == {0: alone(0, 10), 1: [], 2: alone(2, 10)}
    assert ends[1].reason is FinishReason.STOP
    assert account.num_output_tokens == 10 + 2 + 10


async def test_stop_strings_in_all_sequences_end_the_stream() -> None:
    async with running(Bench()) as bench:
        bench.group.eager = False
        async with bench.door.open(family()) as stream:
            await answer(bench, 4)
            for index in range(3):
                stream.finish(index, 1 + index)
            assert bench.holds_nothing()
            _, ends, account = await read_all(stream)
    assert {end.reason for end in ends.values()} == {FinishReason.STOP}
    assert account.num_output_tokens == 1 + 2 + 3
    assert account.finished_ns is not None


async def test_a_slow_reader_has_one_bound_for_all_its_sequences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(token_stream, "MAX_PILED_TOKENS", 29)
    async with running(Bench()) as bench:
        async with bench.door.open(family()) as stream:
            await until(lambda: not bench.scheduler.has_work)
            with pytest.raises(SlowReaderError):
                await read_all(stream)
        assert bench.holds_nothing()
        monkeypatch.setattr(token_stream, "MAX_PILED_TOKENS", 30)
        async with bench.door.open(family()) as stream:
            await until(lambda: not bench.scheduler.has_work)
            _, _, account = await read_all(stream)
    assert account.num_output_tokens == 30


@pytest.mark.parametrize("steps", [0, 1, 4])
async def test_an_abort_ends_every_sequence_before_its_fork_and_behind_it(steps: int) -> None:
    async with running(Bench()) as bench:
        bench.group.eager = False
        async with bench.door.open(family()) as stream:
            await answer(bench, steps)
            assert bench.door.abort("", ["family"]) == (["family"], [])
            assert bench.holds_nothing()
            tokens, ends, account = await read_all(stream)
        assert tokens == {index: alone(index, steps) for index in range(3)}
        assert [ends[index].reason for index in range(3)] == [FinishReason.ABORT] * 3
        assert account.num_output_tokens == 3 * steps


@pytest.mark.parametrize("steps", [0, 1, 4])
async def test_leaving_the_block_frees_what_all_sequences_hold(steps: int) -> None:
    async with running(Bench()) as bench:
        bench.group.eager = False
        async with bench.door.open(family()) as stream:
            await answer(bench, steps)
            assert not bench.holds_nothing()
        assert bench.holds_nothing()
        assert stream.account().num_output_tokens == 3 * steps


async def test_a_deadline_ends_every_sequence_and_keeps_what_it_had() -> None:
    async with running(Bench()) as bench:
        bench.group.eager = False
        soon = family(deadline_ns=time.monotonic_ns() + 100_000_000)
        async with bench.door.open(soon) as stream:
            await answer(bench, 1)
            await until(bench.holds_nothing)
            batch = await anext(aiter(stream))
            assert [gain.token_ids for gain in batch.gains] == [
                tuple(alone(index, 1)) for index in range(3)
            ]
            with pytest.raises(DeadlineError):
                await read_all(stream)


@pytest.mark.parametrize("kept_cache", [True, False])
@pytest.mark.parametrize("steps", [0, 1, 3])
async def test_a_lost_worker_costs_no_sequence_a_token(*, kept_cache: bool, steps: int) -> None:
    async with running(Bench()) as bench:
        bench.group.eager = False
        async with bench.door.open(family()) as stream:
            await answer(bench, steps)
            await until(lambda: bool(bench.group.plans))
            bench.group.leave()
            await until(lambda: not bench.engine.serving)
            bench.group.eager = True
            bench.group.join(NUM_BLOCKS, kept_cache=kept_cache)
            tokens, _, _ = await read_all(stream)
        assert bench.holds_nothing()
    assert tokens == {index: alone(index, 10) for index in range(3)}


async def test_a_row_that_fails_before_the_fork_ends_every_sequence() -> None:
    async with running(Bench()) as bench:
        bench.group.eager = False
        async with bench.door.open(family()) as stream:
            await until(lambda: bool(bench.group.plans))
            plan = bench.group.plans.popleft()
            bench.group.give(bench.group.worker.run(plan, frozenset({plan.admitted[0].row})))
            _, ends, _ = await read_all(stream)
        assert bench.holds_nothing()
    assert [ends[index].reason for index in range(3)] == [FinishReason.ERROR] * 3
    assert {end.error for end in ends.values()} == {"planted"}


async def test_a_smaller_pool_refuses_a_family_that_no_longer_fits() -> None:
    async with running(Bench()) as bench:
        bench.group.eager = False
        async with bench.door.open(family(40)) as stream:
            await until(lambda: bool(bench.group.plans))
            bench.group.leave()
            bench.group.join(12)
            with pytest.raises(NeverFitsError):
                await read_all(stream)
        assert bench.holds_nothing()


async def test_more_sequences_than_rows_never_reach_the_queue() -> None:
    async with running(Bench()) as bench:
        with pytest.raises(InvalidRequestError):
            async with bench.door.open(family(n=5)):
                pytest.fail("it was let in")
        assert bench.scheduler.num_waiting == 0


async def test_a_step_names_a_request_once_whatever_its_sequences() -> None:
    async with running(Bench()) as bench, bench.door.open(family()) as stream:
        await read_all(stream)
    assert {record.request_keys for record in bench.records if record.num_sampled} == {
        (RequestKey("", "family"),)
    }
