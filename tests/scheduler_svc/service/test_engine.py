"""Each request gets the tokens it would get alone, or one clear end; and nothing stays behind."""

import asyncio
import time

import pytest
from structlog.testing import capture_logs

from engine_bench import NUM_BLOCKS, Bench, running
from engine_door_use import ask, read, read_all, submission, until
from fake_group import no_tokens
from fake_worker import generate_alone
from loop_clock import LoopClock
from scheduler_svc.core.errors import (
    DeadlineError,
    DuplicateRequestError,
    HopelessDeadlineError,
    InvariantError,
    NeverFitsError,
    QueueFullError,
    UnavailableError,
)
from scheduler_svc.core.miss_reason import MissReason
from scheduler_svc.core.request import FinishReason, Request
from scheduler_svc.core.step_pace import StepPace
from scheduler_svc.core.step_plan import StepPlan
from scheduler_svc.service.engine_door import EngineDoor, Submission


@pytest.mark.parametrize("depth", [1, 2])
async def test_together_requests_get_the_tokens_they_get_alone(depth: int) -> None:
    prompts = [[i % 3, *range(i), i % 2] for i in range(12)]
    async with running(Bench(depth=depth)) as bench:
        answers = await asyncio.gather(
            *(ask(bench.door, f"r{i}", prompt, 5 + i) for i, prompt in enumerate(prompts))
        )
        assert bench.holds_nothing()
    assert answers == [generate_alone(p, 5 + i, frozenset()) for i, p in enumerate(prompts)]


async def test_a_request_says_why_its_hit_ended_in_account_log_and_totals() -> None:
    prompt = [1] * 8
    async with running(Bench()) as bench:
        with capture_logs() as lines:
            for reason in (MissReason.UNSEEN, MissReason.LAST_TOKEN):
                async with bench.door.open(submission("r", prompt, 2)) as stream:
                    assert stream.account().miss_reason is None
                    _, _, account = await read(stream)
                    assert account.miss_reason is reason
        cache = bench.door.load().cache
    assert [line["miss_reason"] for line in lines if line["event"] == "request ended"] == [
        "unseen",
        "last_token",
    ]
    assert cache.missed_tokens == {MissReason.UNSEEN: 8, MissReason.LAST_TOKEN: 4}
    assert cache.hit_rate == 0.25


async def test_leaving_the_block_frees_everything_at_once() -> None:
    async with running(Bench()) as bench:
        async with bench.door.open(submission("r", [1, 2, 3], 100)) as stream:
            await anext(aiter(stream))
            assert not bench.holds_nothing()
        assert bench.holds_nothing()


async def test_a_cancelled_reader_frees_everything() -> None:
    async with running(Bench()) as bench:
        bench.group.eager = False
        reader = asyncio.create_task(ask(bench.door, "r", [1, 2, 3], 100))
        await until(lambda: bench.scheduler.num_running == 1)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert bench.holds_nothing()


async def test_a_passed_deadline_ends_the_request_and_keeps_what_it_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running(Bench()) as bench:
        clock = LoopClock(monkeypatch)
        bench.group.eager = False
        deadline_ns = time.monotonic_ns() + 60_000_000_000
        async with bench.door.open(submission("r", [1], deadline_ns=deadline_ns)) as stream:
            await until(lambda: bool(bench.group.plans))
            bench.group.answer()
            batch = await anext(aiter(stream))
            assert batch.gains[0].token_ids == tuple(generate_alone([1], 1, frozenset()))
            await clock.pass_(30.0)
            assert not bench.holds_nothing()
            clock.jump(30.0)
            with pytest.raises(DeadlineError):
                await read(stream)
            assert bench.holds_nothing()


async def test_a_deadline_in_the_past_never_reaches_the_scheduler() -> None:
    async with running(Bench()) as bench:
        with pytest.raises(DeadlineError):
            async with bench.door.open(submission("r", [1], deadline_ns=time.monotonic_ns())):
                pytest.fail("it was let in")
        assert bench.scheduler.counters.prompt_tokens == 0


async def test_abort_ends_the_named_streams_and_names_the_unknown() -> None:
    async with (
        running(Bench()) as bench,
        bench.door.open(submission("one", [1], 100)) as one,
        bench.door.open(submission("two", [2], 3)) as two,
    ):
        assert bench.door.abort("", ["one", "nobody", "one"]) == (["one"], ["nobody"])
        _, finish, _ = await read(one)
        assert finish.reason is FinishReason.ABORT
        assert bench.door.abort("", ["one"]) == ([], ["one"])
        tokens, _, _ = await read(two)
        assert tokens == generate_alone([2], 3, frozenset())
        assert bench.door.abort("", None) == ([], [])


async def test_the_requests_of_all_tenants_end_at_once() -> None:
    async with (
        running(Bench()) as bench,
        bench.door.open(submission("same", [1], 100)) as one,
        bench.door.open(submission("same", [2], 100, tenant="other")) as two,
    ):
        assert bench.door.abort_everyone() == ["same", "same"]
        for stream in (one, two):
            _, finish, _ = await read(stream)
            assert finish.reason is FinishReason.ABORT
        assert bench.door.abort_everyone() == []
        assert bench.holds_nothing()


async def test_without_a_worker_requests_wait_and_then_are_unavailable() -> None:
    async with running(Bench(worker_wait_s=0.05), join=False) as bench:
        with pytest.raises(UnavailableError, match=r"0\.05 s"):
            async with bench.door.open(submission("waits", [1])) as stream:
                await read(stream)
        with pytest.raises(UnavailableError):
            async with bench.door.open(submission("refused", [1])):
                pytest.fail("it was let in")
        bench.group.join(NUM_BLOCKS)
        await until(lambda: bool(bench.engine.serving))
        assert await ask(bench.door, "served", [1], 3) == generate_alone([1], 3, frozenset())


async def test_the_wait_for_a_worker_begins_when_the_last_one_was_lost() -> None:
    async with running(Bench(worker_wait_s=0.2)) as bench:
        bench.group.eager = False
        async with bench.door.open(submission("r", [1])) as stream:
            await until(lambda: bool(bench.group.plans))
            await asyncio.sleep(0.1)
            lost_ns = time.monotonic_ns()
            bench.group.leave()
            with pytest.raises(UnavailableError):
                await read(stream)
        assert time.monotonic_ns() - lost_ns > 190_000_000


async def test_a_request_queued_before_the_worker_came_is_served() -> None:
    async with running(Bench(), join=False) as bench:
        asking = asyncio.create_task(ask(bench.door, "r", [1, 2], 6))
        await until(lambda: bench.scheduler.num_waiting == 1)
        assert not bench.engine.serving
        bench.group.join(NUM_BLOCKS)
        assert await asking == generate_alone([1, 2], 6, frozenset())


async def read_whole(door: EngineDoor, asked: Submission) -> None:
    async with door.open(asked) as stream:
        await read_all(stream)


@pytest.mark.parametrize("num_sequences", [1, 2])
async def test_what_can_never_fit_is_refused_alike_before_and_after_the_worker_came(
    num_sequences: int,
) -> None:
    bench = Bench()

    async def refusal() -> str:
        big = submission("big", [1] * 20, 8, num_sequences=num_sequences)
        with pytest.raises(NeverFitsError, match="need 27 slots") as caught:
            await read_whole(bench.door, big)
        return f"{caught.value.field}: {caught.value}"

    async with running(bench, join=False):
        before = asyncio.create_task(refusal())
        await until(lambda: bench.scheduler.num_waiting > 0)
        bench.group.join(4)
        assert await before == await refusal()
        assert bench.holds_nothing()


async def test_what_a_smaller_pool_holds_no_more_keeps_what_it_has() -> None:
    async with running(Bench()) as bench:
        bench.group.eager = False
        async with bench.door.open(submission("big", [1] * 20, 8)) as stream:
            for _ in range(4):
                await until(lambda: bool(bench.group.plans))
                bench.group.answer()
            bench.group.leave()
            bench.group.join(4)
            tokens, finish, _ = await read(stream)
        assert tokens == generate_alone([1] * 20, 8, frozenset())[: len(tokens)]
        assert len(tokens) > 0
        assert finish.reason is FinishReason.ERROR
        assert "need 27 slots" in finish.error


@pytest.mark.parametrize("kept_cache", [True, False])
async def test_a_lost_worker_costs_no_token_and_repeats_none(*, kept_cache: bool) -> None:
    async with running(Bench()) as bench:
        bench.group.eager = False
        asking = asyncio.create_task(ask(bench.door, "r", [0, 1, 2, 0, 1], 12))
        for _ in range(5):
            await until(lambda: len(bench.group.plans) == 2)
            bench.group.answer()
        await until(lambda: len(bench.group.plans) == 2)
        bench.group.leave()
        await until(lambda: not bench.engine.serving)
        bench.group.eager = True
        bench.group.join(NUM_BLOCKS, kept_cache=kept_cache)
        assert await asking == generate_alone([0, 1, 2, 0, 1], 12, frozenset())
    again = [record.step_id for record in bench.records if record.epoch_number == 2]
    assert again == list(range(len(again)))
    assert len(bench.records) == 5 + len(again)


async def test_a_smaller_pool_ends_only_what_no_longer_fits() -> None:
    async with running(Bench()) as bench:
        bench.group.eager = False
        async with bench.door.open(submission("large", [1] * 20, 60)) as large:
            small = asyncio.create_task(ask(bench.door, "small", [2], 5))
            await until(lambda: bench.scheduler.num_waiting == 1)
            bench.group.leave()
            bench.group.eager = True
            bench.group.join(4)
            with pytest.raises(NeverFitsError, match="the whole pool has 16"):
                await read(large)
            assert await small == generate_alone([2], 5, frozenset())


async def test_a_result_that_fits_no_plan_costs_the_worker_its_connection() -> None:
    async with running(Bench()) as bench:
        bench.group.eager = False
        asking = asyncio.create_task(ask(bench.door, "r", [1], 4))
        await until(lambda: bool(bench.group.plans))
        bench.group.give(no_tokens(step_id=0))
        await until(lambda: bool(bench.group.dropped))
        assert bench.group.dropped == ["step 0 gave 0 tokens, expected 1"]
        bench.group.eager = True
        bench.group.join(NUM_BLOCKS)
        assert await asking == generate_alone([1], 4, frozenset())


async def test_draining_refuses_new_requests_and_waits_for_the_old() -> None:
    async with running(Bench()) as bench:
        bench.group.eager = False
        asking = asyncio.create_task(ask(bench.door, "old", [1], 6))
        await until(lambda: bool(bench.group.plans))
        draining = asyncio.create_task(bench.door.drain())
        await until(lambda: not bench.engine.serving)
        assert bench.door.server_state().draining
        with pytest.raises(UnavailableError, match="drains"):
            async with bench.door.open(submission("new", [1])):
                pytest.fail("it was let in")
        assert not draining.done()
        bench.group.eager = True
        bench.group.answer()
        bench.group.answer()
        assert await asking == generate_alone([1], 6, frozenset())
        await draining
        bench.door.resume()
        assert bench.engine.serving
        assert await ask(bench.door, "new", [1], 2) == generate_alone([1], 2, frozenset())


async def test_a_server_that_stops_does_not_resume() -> None:
    async with running(Bench()) as bench:
        await until(lambda: bool(bench.engine.serving))
        await bench.engine.drain(for_good=True)
        bench.door.resume()
        assert not bench.engine.serving
        with pytest.raises(UnavailableError):
            async with bench.door.open(submission("new", [1])):
                pytest.fail("it was let in")


async def test_at_the_end_of_a_drain_the_rest_keep_what_they_had() -> None:
    async with running(Bench()) as bench:
        bench.group.eager = False
        async with bench.door.open(submission("r", [1], 50)) as stream:
            await until(lambda: bool(bench.group.plans))
            bench.group.answer()
            await until(lambda: bool(bench.records))
            bench.engine.fail_all(UnavailableError("the server stops"))
            assert bench.holds_nothing()
            batch = await anext(aiter(stream))
            assert batch.gains[0].token_ids == tuple(generate_alone([1], 1, frozenset()))
            with pytest.raises(UnavailableError, match="stops"):
                await read(stream)


async def test_an_id_in_use_and_a_full_queue_are_refused() -> None:
    async with running(Bench(max_waiting=1), join=False) as bench:
        async with bench.door.open(submission("r", [1])):
            for request_id, error in (("r", DuplicateRequestError), ("s", QueueFullError)):
                with pytest.raises(error):
                    async with bench.door.open(submission(request_id, [1])):
                        pytest.fail("it was let in")
        async with bench.door.open(submission("r", [1])):
            assert bench.scheduler.num_waiting == 1


async def test_an_open_bound_becomes_what_length_and_pool_allow() -> None:
    async with running(Bench()) as bench:
        await until(lambda: bool(bench.engine.serving))
        async with bench.door.open(submission("r", [1] * 28, None)) as stream:
            assert stream.accepted.max_output_tokens == 100
            assert stream.accepted.num_prompt_tokens == 28
            assert stream.accepted.seed == 7


async def test_a_record_tells_a_step_in_order_of_time() -> None:
    async with running(Bench()) as bench:
        await ask(bench.door, "r", [1, 2, 3], 4)
        load = bench.door.load()
    first = bench.records[0]
    assert (first.step_id, first.epoch_number) == (0, 1)
    assert (first.num_rows, first.num_tokens, first.num_sampled) == (1, 3, 1)
    assert first.request_keys == (("", "r"),)
    assert (first.wait_ns, first.execute_ns, first.codec_ns) == (1, 10, 5)
    stamps = [
        first.schedule_begin_ns,
        first.schedule_end_ns,
        first.encoded_ns,
        first.sent_ns,
        first.result_received_ns,
        first.decoded_ns,
        first.applied_ns,
        first.emitted_ns,
    ]
    assert stamps == sorted(stamps)
    assert load.totals.steps == len(bench.records) == 4
    assert load.totals.generation_tokens == 4
    assert load.recent is not None
    assert load.recent.steps == 4
    assert (load.total_blocks, load.used_blocks) == (NUM_BLOCKS, 0)
    assert load.idle_cached_blocks + load.free_blocks == NUM_BLOCKS


async def test_a_chosen_step_carries_its_trace_to_the_worker_and_to_the_record() -> None:
    async with running(Bench()) as bench:
        await ask(bench.door, "r", [1], 4)
    assert bench.group.traceparents[:4] == ["", "trace-1", "", "trace-3"]
    assert [record.traceparent for record in bench.records[:2]] == ["", "trace-1"]


async def test_a_contradiction_met_at_the_door_ends_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def contradict(_request: Request, _now_ns: int, _pace: StepPace) -> None:
        raise InvariantError("planted")

    bench = Bench()
    loop = asyncio.create_task(bench.engine.run())
    monkeypatch.setattr(bench.scheduler, "add", contradict)
    with pytest.raises(InvariantError):
        async with bench.door.open(submission("r", [1])):
            pytest.fail("it was let in")
    async with asyncio.timeout(10):
        with pytest.raises(InvariantError):
            await loop


@pytest.mark.parametrize("kind", [InvariantError, IndexError, RuntimeError, MemoryError])
async def test_whatever_ends_the_loop_leaves_the_state_in_the_log(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def break_down(_now_ns: int) -> StepPlan | None:
        raise kind("planted")

    bench = Bench()
    loop = asyncio.create_task(bench.engine.run())
    bench.group.join(NUM_BLOCKS)
    await until(lambda: bench.scheduler.pool is not None)
    monkeypatch.setattr(bench.scheduler, "schedule", break_down)
    async with bench.door.open(submission("victim", [1])):
        async with asyncio.timeout(10):
            with pytest.raises(kind, match="planted"):
                await loop
    told = capsys.readouterr().out
    assert f"pool: {NUM_BLOCKS} blocks" in told
    assert "'victim'" in told


async def test_work_that_cannot_start_in_time_is_refused_at_once() -> None:
    async with running(Bench()) as bench:
        for number in range(3):
            await ask(bench.door, f"warm{number}", [number], 20)
        bench.group.eager = False
        bench.group.execute_ns = 10**9
        others = [
            asyncio.create_task(ask(bench.door, f"r{number}", [number] * 16, 64))
            for number in range(40)
        ]
        for _ in range(64):
            await until(lambda: bool(bench.group.plans))
            bench.group.answer()
        await until(lambda: bool(bench.group.plans))
        soon_ns = time.monotonic_ns() + 3 * 10**9
        with pytest.raises(HopelessDeadlineError, match=r"the earliest start in \d+\.000 s"):
            async with bench.door.open(submission("hurried", [1], deadline_ns=soon_ns)):
                pytest.fail("it was let in")
        later_ns = time.monotonic_ns() + 600 * 10**9
        async with bench.door.open(submission("patient", [1], deadline_ns=later_ns)):
            assert bench.scheduler.num_waiting > 20
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        assert bench.holds_nothing()


async def test_a_deadline_that_passes_in_the_queue_costs_no_step() -> None:
    async with running(Bench()) as bench:
        bench.group.eager = False
        others = [asyncio.create_task(ask(bench.door, f"r{i}", [i], 1)) for i in range(4)]
        await until(lambda: bench.scheduler.num_running == 4)
        deadline_ns = time.monotonic_ns() + 20_000_000
        async with bench.door.open(submission("late", [1], deadline_ns=deadline_ns)) as late:
            # The loop sleeps past the deadline, so that a row is free before the timer is due.
            time.sleep(0.03)
            while bench.group.plans:
                bench.group.answer()
            async with asyncio.timeout(10):
                with pytest.raises(DeadlineError):
                    await read(late)
        await asyncio.gather(*others)
        assert not bench.group.plans
        assert late.account().first_scheduled_ns is None
