"""Whatever happens around it, each request gets exactly the tokens it gets alone."""

from array import array
from contextlib import suppress
from dataclasses import dataclass
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_worker import FakeWorker, generate_alone
from scheduler_bench import BLOCK_SIZE, ROOT, Bench, bench, limits, request
from scheduler_svc.core.block_hash import ExtraKeys
from scheduler_svc.core.errors import (
    DuplicateRequestError,
    InvalidRequestError,
    NeverFitsError,
    QueueFullError,
    RequestError,
)
from scheduler_svc.core.eviction import EVICTION_POLICIES
from scheduler_svc.core.kv_memory import KvMemory
from scheduler_svc.core.request import FinishReason
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step_plan import StepResult
from scheduler_svc.core.victims import VICTIM_POLICIES
from scheduler_svc.core.waiting_queue import waiting_queue

# Two distinct tokens, so that prompts share prefixes; a small pool, so that they fight over it.
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=14)


@dataclass
class Job:
    prompt: list[int]
    max_output: int
    arrives: int
    aborted: int | None
    salt: bytes
    stops: bool
    priority: int
    tenant: str

    @property
    def stop(self) -> frozenset[int]:
        return frozenset({2}) if self.stops else frozenset()

    def alone(self) -> list[int]:
        return generate_alone(self.prompt, self.max_output, self.stop)


jobs = st.builds(
    Job,
    prompt=prompts,
    max_output=st.integers(1, 10),
    arrives=st.integers(0, 10),
    aborted=st.none() | st.integers(0, 20),
    salt=st.sampled_from([b"", b"", b"pepper"]),
    stops=st.booleans(),
    priority=st.integers(-1, 1),
    tenant=st.sampled_from("ab"),
)


@dataclass
class Policies:
    """What decides on order, and may change no token."""

    waiting: str
    ageing_ns: int
    victim: str
    threshold: int
    max_long: int
    max_passes: int
    max_pass_ns: int
    eviction: str
    pinned_share: float
    num_draft_tokens: int

    def scheduler(self, budget: int, depth: int, caching: bool) -> Scheduler:
        return Scheduler(
            limits(
                budget,
                depth=depth,
                long_prefill_token_threshold=self.threshold,
                max_long_prefills=self.max_long if self.threshold else 0,
                max_passes=self.max_passes,
                max_pass_ns=self.max_pass_ns,
                num_draft_tokens=self.num_draft_tokens,
            ),
            enable_prefix_caching=caching,
            waiting=waiting_queue(self.waiting, ageing_ns=self.ageing_ns),
            choose_victim=VICTIM_POLICIES[self.victim],
            memory=KvMemory(EVICTION_POLICIES[self.eviction], max_pinned_share=self.pinned_share),
        )


policies = st.builds(
    Policies,
    waiting=st.sampled_from(["fcfs", "priority", "fair"]),
    ageing_ns=st.sampled_from([0, 1, 10]),
    victim=st.sampled_from(["cheapest", "newest"]),
    threshold=st.sampled_from([0, 1, 5]),
    max_long=st.integers(0, 2),
    max_passes=st.integers(0, 3),
    max_pass_ns=st.sampled_from([0, 10, 1000]),
    eviction=st.sampled_from(sorted(EVICTION_POLICIES)),
    pinned_share=st.sampled_from([0.0, 0.25, 0.5]),
    num_draft_tokens=st.sampled_from([0, 0, 1, 3]),
)


@settings(deadline=None, max_examples=400)
@given(
    load=st.lists(jobs, min_size=1, max_size=8),
    budget=st.integers(1, 16),
    depth=st.integers(1, 2),
    num_blocks=st.integers(6, 24),
    losses=st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=2),
    caching=st.booleans(),
    policy=policies,
    pins=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 7), st.integers(0, 60)), max_size=4),
)
def test_nothing_changes_the_tokens_of_a_request(
    load: list[Job],
    budget: int,
    depth: int,
    num_blocks: int,
    losses: list[tuple[int, bool]],
    caching: bool,
    policy: Policies,
    pins: list[tuple[int, int, int]],
) -> None:
    # What may be pinned comes on top of what the largest request needs.
    num_blocks = ceil(num_blocks / (1 - policy.pinned_share))
    scheduler = policy.scheduler(budget, depth, caching)
    table = Bench(scheduler, num_blocks)
    requests = [
        request(
            str(i),
            job.prompt,
            job.max_output,
            stop=job.stop,
            salt=job.salt,
            priority=job.priority,
            tenant=job.tenant,
            weight=1.0 + (job.tenant == "b"),
        )
        for i, job in enumerate(load)
    ]
    delivered: dict[str, list[int]] = {each.request_id: [] for each in requests}
    # Each turn computes a token at least. Nothing may be computed again and again.
    work = sum(len(job.prompt) + job.max_output for job in load)
    most_turns = 30 + 2 * work
    turns = 0
    while scheduler.has_work or table.wire or turns <= 10:
        for job, each in zip(load, requests, strict=True):
            if job.arrives == turns:
                table.send(each)
            if job.aborted == turns and each.sequence >= 0:
                scheduler.abort(each, table.now_ns)
        for turn, number, lifetime_ns in pins:
            if turn == turns:
                prompt = array("i", load[number % len(load)].prompt)
                with suppress(RequestError):
                    scheduler.pin(prompt, ExtraKeys(), table.now_ns + lifetime_ns)
        for turn, same_process in losses:
            if turn == turns:
                scheduler.lose_worker(table.now_ns)
                assert scheduler.schedule(table.now_ns) is None
                table.wire.clear()
                if same_process:
                    scheduler.rejoin(table.now_ns)
                else:
                    table.worker = FakeWorker(BLOCK_SIZE, num_blocks)
                    assert scheduler.start_epoch(num_blocks, ROOT, table.now_ns) == []
        outcome = table.turn()
        if outcome is not None:
            for each, token in zip(outcome.requests, outcome.tokens, strict=True):
                delivered[each.request_id].append(token)
        turns += 1
        assert turns < most_turns

    assert scheduler.pool is not None
    assert scheduler.num_broken_pins == 0
    scheduler.pool.set_time(table.now_ns + 100)
    assert scheduler.pool.num_free == num_blocks
    assert scheduler.counters.recomputed_tokens <= work * (1 + len(losses))
    for job, each in zip(load, requests, strict=True):
        output = each.output_token_ids().tolist()
        assert delivered[each.request_id] == output
        if each.finish_reason is FinishReason.ABORT:
            assert output == job.alone()[: len(output)]
        else:
            assert output == job.alone()
            stopped = bool(output) and output[-1] in job.stop
            assert each.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)


@settings(deadline=None, max_examples=100)
@given(
    load=st.lists(st.tuples(prompts, st.integers(1, 8)), min_size=2, max_size=6),
    depth=st.integers(1, 2),
    failing=st.sets(st.tuples(st.integers(0, 8), st.integers(0, 3)), min_size=1, max_size=3),
)
def test_a_failed_row_harms_nobody_else(
    load: list[tuple[list[int], int]], depth: int, failing: set[tuple[int, int]]
) -> None:
    table = bench(12, depth=depth)
    requests = [request(str(i), prompt, count) for i, (prompt, count) in enumerate(load)]
    table.send(*requests)
    turns = 0
    while table.scheduler.has_work or table.wire:
        table.turn(frozenset(row for turn, row in failing if turn == turns))
        turns += 1
    for (prompt, count), each in zip(load, requests, strict=True):
        output = each.output_token_ids().tolist()
        alone = generate_alone(prompt, count, frozenset())
        if each.finish_reason is FinishReason.ERROR:
            assert each.error == "planted"
            assert output == alone[: len(output)]
        else:
            assert output == alone


def test_nothing_computed_from_a_failed_row_can_be_hit() -> None:
    table = bench(64, rows=6)
    failing = request("failing", [0] * 8 + [1])
    reading = request("reading", [0] * 8 + [1] * 9)
    of_that = request("of that", [0] * 8 + [1] * 12)
    unharmed = request("unharmed", [1] * 9)
    table.send(failing, reading, of_that, unharmed)
    plan = table.plan(frozenset({0}))
    assert plan is not None
    assert [row.num_computed_tokens for row in plan.admitted] == [0, 8, 16, 0]
    outcome = table.answer()
    assert outcome.finished == [failing]
    assert [each.num_preemptions for each in (reading, of_that, unharmed)] == [1, 1, 0]
    pool = table.scheduler.pool
    assert pool is not None
    assert [pool.lookup(name) for name in of_that.hashes] == [None] * 5
    assert all(pool.lookup(name) for name in unharmed.hashes)
    table.run()
    for each in (reading, of_that):
        alone = generate_alone(each.tokens[: each.num_prompt_tokens].tolist(), 4, frozenset())
        assert each.output_token_ids().tolist() == alone


def test_what_a_gone_row_named_in_the_failed_step_cannot_be_hit() -> None:
    table = bench(64)
    table.send(request("failing", [0] * 8 + [1]), gone := request("gone", [0] * 8 + [1] * 9))
    table.plan(frozenset({0}))
    table.scheduler.abort(gone, table.now_ns)
    table.answer()
    pool = table.scheduler.pool
    assert pool is not None
    assert [pool.lookup(name) for name in gone.hashes] == [None] * 4


def test_an_equal_prompt_of_the_same_step_is_computed_once() -> None:
    table = bench(64, budget=1000, length=200)
    table.send(request("a", [1] * 100), request("b", [1] * 100))
    plan = table.plan()
    assert plan is not None
    assert [row.num_new_tokens for row in plan.admitted] == [100, 4]


def test_a_whole_prompt_in_the_cache_still_computes_its_last_block() -> None:
    table = bench()
    for name, cached in (("first", 0), ("second", 4), ("third", 4)):
        each = request(name, [0, 1, 0, 1, 0, 1, 0, 1])
        table.send(each)
        table.run()
        assert each.num_cached_tokens == cached


def test_a_reused_block_is_unreachable_under_its_old_name() -> None:
    table = bench(4)
    for prompt, cached in (([0, 1] * 4, 0), ([1] * 16, 0), ([0, 1] * 4, 0)):
        each = request("x", prompt, 1)
        table.send(each)
        table.run()
        assert each.num_cached_tokens == cached


def test_a_salt_separates_prefixes() -> None:
    table = bench()
    for salt, cached in ((b"s1", 0), (b"s1", 8), (b"s2", 0), (b"", 0), (b"s1 ", 0), (b"s1", 8)):
        each = request("x", [0, 1] * 6, 1, salt=salt)
        table.send(each)
        table.run()
        assert each.num_cached_tokens == cached


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("max_output", [1, 2, 3, 5])
def test_no_slot_is_wasted_when_the_end_is_known(depth: int, max_output: int) -> None:
    table = bench(depth=depth)
    table.send(request("x", [0] * 9, max_output))
    planned = 0
    while table.scheduler.has_work:
        while (plan := table.plan()) is not None:
            planned += plan.num_tokens
        table.answer()
    assert planned == 9 + max_output - 1


def test_a_stop_found_late_costs_one_slot() -> None:
    table = bench(depth=2)
    alone = generate_alone([0, 1, 1], 20, frozenset({2}))
    table.send(request("x", [0, 1, 1], 20, stop=frozenset({2})))
    planned = 0
    while table.scheduler.has_work:
        while (plan := table.plan()) is not None:
            planned += plan.num_tokens
        table.answer()
    assert len(alone) < 20
    assert planned == 3 + len(alone) - 1 + 1


@pytest.mark.parametrize(("length", "steps"), [(7, 1), (8, 1), (9, 2), (16, 2), (17, 3), (24, 3)])
def test_the_first_token_comes_with_the_last_chunk(length: int, steps: int) -> None:
    table = bench(budget=8)
    each = request("x", [0] * length, 3)
    table.send(each)
    outcomes = [table.turn() for _ in range(steps)]
    assert [len(outcome.tokens) for outcome in outcomes if outcome] == [0] * (steps - 1) + [1]
    table.run()
    assert each.num_output_tokens == 3


def test_a_preempted_request_keeps_the_token_in_flight() -> None:
    table = bench(10, budget=100, length=40, depth=2)
    first, second = request("a", [0] * 19, 20), request("b", [1] * 19, 20)
    table.send(first, second)
    table.run()
    assert first.num_preemptions == 0
    assert second.num_preemptions >= 1
    for each, prompt in ((first, [0] * 19), (second, [1] * 19)):
        assert each.output_token_ids().tolist() == generate_alone(prompt, 20, frozenset())


def test_a_resumed_request_hits_what_it_left_behind() -> None:
    table = bench()
    each = request("x", [0, 1] * 4, 12)
    table.send(each)
    while table.scheduler.num_in_flight or table.scheduler.counters.generation_tokens < 5:
        table.turn()
    table.scheduler.lose_worker(table.now_ns)
    table.scheduler.rejoin(table.now_ns)
    plan = table.plan()
    assert plan is not None
    assert plan.reset
    assert plan.admitted[0].num_computed_tokens == 12
    assert plan.num_tokens == 1


def test_a_request_that_can_never_fit_is_refused_with_both_numbers() -> None:
    table = bench(8)
    with pytest.raises(NeverFitsError, match=r"40 tokens.*the whole pool has 32"):
        table.send(request("long", [0] * 40, 4))
    exact = request("exact", [0] * 32, 1)
    table.send(exact)
    table.run()
    assert exact.num_output_tokens == 1


def test_an_open_end_is_cut_to_what_fits() -> None:
    table = bench(8, length=64)
    each = request("open", [0] * 30, None)
    table.send(each)
    table.run()
    assert each.num_output_tokens == 3
    assert each.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("prompt", "max_output", "produced"), [(62, None, 2), (63, None, 1), (62, 2, 2), (10, 54, 54)]
)
def test_the_model_length_ends_an_output(
    prompt: int, max_output: int | None, produced: int
) -> None:
    table = bench(32, length=64)
    each = request("x", [0] * prompt, max_output)
    table.send(each)
    table.run()
    assert each.num_output_tokens == produced


@pytest.mark.parametrize(("prompt", "max_output"), [(0, 1), (64, None), (65, 1), (62, 10)])
def test_what_exceeds_the_model_length_is_refused(prompt: int, max_output: int | None) -> None:
    table = bench(32, length=64)
    with pytest.raises(InvalidRequestError, match="must"):
        table.send(request("x", [0] * prompt, max_output))
    assert not table.scheduler.has_work


def test_the_queue_is_bounded_and_ids_are_unique() -> None:
    table = bench(waiting=2)
    table.send(request("a", [0]), request("b", [0]))
    with pytest.raises(QueueFullError):
        table.send(request("c", [0]))
    table.plan()
    with pytest.raises(DuplicateRequestError):
        table.send(request("a", [1]))
    table.run()
    table.send(request("a", [1]))
    table.run()


def test_a_stop_string_cuts_the_output_and_frees_the_row() -> None:
    table = bench(depth=2)
    each = request("x", [0, 1], 30)
    table.send(each)
    while table.scheduler.counters.generation_tokens < 6:
        table.turn()
    table.scheduler.finish(each, 4, table.now_ns)
    table.scheduler.check()
    assert each.finish_reason is FinishReason.STOP
    assert each.output_token_ids().tolist() == generate_alone([0, 1], 4, frozenset())
    assert table.scheduler.pool is not None
    assert table.scheduler.pool.num_used == 0
    table.run()


def test_a_smaller_pool_ends_only_what_no_longer_fits() -> None:
    table = bench(32)
    big, small = request("big", [0] * 40, 10), request("small", [1] * 8, 4)
    table.send(big, small)
    table.turn()
    table.num_blocks = 8
    table.wire.clear()
    table.worker = FakeWorker(BLOCK_SIZE, 8)
    assert table.scheduler.start_epoch(8, ROOT, table.now_ns) == [big]
    assert big.finish_reason is FinishReason.ERROR
    assert "whole pool has 32" in big.error
    table.run()
    assert small.output_token_ids().tolist() == generate_alone([1] * 8, 4, frozenset())


def test_an_open_end_that_has_outgrown_a_smaller_pool_ends() -> None:
    for num_blocks, fits in ((5, True), (4, False)):
        table = bench(8)
        each = request("open", [0] * 9, None)
        table.send(each)
        while table.scheduler.counters.generation_tokens < 8:
            table.turn()
        table.scheduler.lose_worker(table.now_ns)
        assert each.num_tokens == 17
        table.wire.clear()
        table.worker = FakeWorker(BLOCK_SIZE, num_blocks)
        ended = table.scheduler.start_epoch(num_blocks, ROOT, table.now_ns)
        assert ended == ([] if fits else [each])
        table.run()
        assert each.num_tokens == (21 if fits else 17)
        assert fits or "need 17 slots" in each.error


def test_a_result_that_does_not_fit_changes_nothing() -> None:
    table = bench()
    table.send(request("x", [0, 1], 2))
    table.plan()
    _, result = table.wire[0]
    for wrong in (
        StepResult(result.step_id + 1, result.tokens),
        StepResult(result.step_id, result.tokens[:0]),
        StepResult(result.step_id, result.tokens, num_tokens=result.tokens * 0),
    ):
        with pytest.raises(ValueError, match="expected"):
            table.scheduler.apply(wrong, 0)
    table.run()


def test_hits_are_counted_at_first_admission_only() -> None:
    table = bench(6, budget=100)
    table.send(*(request(str(i), [i] * 8, 8) for i in range(3)))
    table.run()
    counters = table.scheduler.counters
    assert counters.preemptions > 0
    assert counters.recomputed_tokens > 0
    assert (counters.prefix_queries, counters.prefix_hits) == (24, 0)
    table.send(request("again", [0] * 8 + [5], 1))
    table.run()
    assert counters.prefix_queries == 33
    assert counters.prefix_hits in {0, 4, 8}
