"""Beams on shared blocks: each search finds what it finds alone, whatever happens around it."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_worker import FakeWorker, generate_alone, search_alone
from scheduler_bench import ROOT, Bench, bench, limits, request
from scheduler_svc.core.beam_options import BeamOptions, EarlyStopping
from scheduler_svc.core.errors import InvalidRequestError
from scheduler_svc.core.request import FinishReason, Request
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step_plan import Candidates, StepResult
from scheduler_svc.core.victims import VICTIM_POLICIES
from scheduler_svc.core.waiting_queue import waiting_queue

NO_STOP: frozenset[int] = frozenset()


@dataclass
class Job:
    prompt: list[int]
    beam: BeamOptions | None
    n: int
    max_output: int
    arrives: int
    aborted: int | None
    stop: frozenset[int]
    read_cache: bool
    priority: int
    tenant: str

    def request(self, name: str) -> Request:
        return request(
            name,
            self.prompt,
            self.max_output,
            stop=self.stop,
            n=1 if self.beam else self.n,
            beam=self.beam,
            read_cache=self.read_cache,
            priority=self.priority,
            tenant=self.tenant,
        )


options = st.builds(
    BeamOptions,
    width=st.integers(1, 4),
    length_penalty=st.sampled_from([0.0, 1.0, -1.0]),
    early_stopping=st.sampled_from(EarlyStopping),
    num_returned=st.just(1),
)
jobs = st.builds(
    Job,
    prompt=st.lists(st.integers(0, 1), min_size=1, max_size=10),
    beam=st.none() | options | options,
    n=st.integers(1, 3),
    max_output=st.integers(1, 9),
    arrives=st.integers(0, 8),
    aborted=st.none() | st.integers(0, 14),
    stop=st.sampled_from([NO_STOP, frozenset({2}), frozenset({2, 5})]),
    read_cache=st.booleans(),
    priority=st.integers(0, 1),
    tenant=st.sampled_from("ab"),
)


@settings(deadline=None, max_examples=300)
@given(
    load=st.lists(jobs, min_size=1, max_size=4),
    budget=st.integers(1, 16),
    depth=st.integers(1, 2),
    block_size=st.sampled_from([1, 2, 3, 4, 8]),
    spare_blocks=st.integers(0, 16),
    losses=st.lists(st.tuples(st.integers(0, 20), st.booleans()), max_size=2),
    failing=st.sets(st.tuples(st.integers(0, 20), st.integers(0, 5)), max_size=2),
    caching=st.booleans(),
    policy=st.sampled_from(["fcfs", "priority", "fair"]),
    victim=st.sampled_from(["cheapest", "newest"]),
)
def test_each_search_finds_what_it_finds_alone(
    load: list[Job],
    budget: int,
    depth: int,
    block_size: int,
    spare_blocks: int,
    losses: list[tuple[int, bool]],
    failing: set[tuple[int, int]],
    caching: bool,
    policy: str,
    victim: str,
) -> None:
    scheduler = Scheduler(
        limits(budget, rows=5, depth=depth, block_size=block_size),
        enable_prefix_caching=caching,
        waiting=waiting_queue(policy),
        choose_victim=VICTIM_POLICIES[victim],
    )
    num_blocks = spare_blocks + max(blocks_needed(job, block_size) for job in load)
    table = Bench(scheduler, num_blocks)
    requests = [job.request(str(i)) for i, job in enumerate(load)]
    finished: list[Request] = []
    turns = 0
    while scheduler.has_work or table.wire or turns <= 8:
        for job, each in zip(load, requests, strict=True):
            if job.arrives == turns:
                table.send(each)
            if job.aborted == turns and each.sequence >= 0:
                scheduler.abort_family(each, table.now_ns)
                scheduler.check()
        for turn, same_process in losses:
            if turn == turns:
                lose_worker(table, same_process, num_blocks)
        outcome = table.turn(frozenset(row for turn, row in failing if turn == turns))
        finished += outcome.finished if outcome else []
        turns += 1
        assert turns < 1000
    assert scheduler.pool is not None
    assert scheduler.pool.num_free == num_blocks
    assert len(set(finished)) == len(finished)
    for job, each in zip(load, requests, strict=True):
        for member in each.members:
            if member.finish_reason in {FinishReason.ABORT, FinishReason.ERROR}:
                assert failing or job.aborted is not None
            else:
                assert member in finished
                check_output(job, member)


def check_output(job: Job, member: Request) -> None:
    output = member.output_token_ids().tolist()
    if job.beam is None:
        assert output == generate_alone(job.prompt, job.max_output, job.stop, member.index)
        return
    alone = search_alone(job.prompt, job.beam, member.stopping, job.max_output)
    assert member.hypotheses == alone
    assert tuple(output) == alone[0].tokens
    assert member.finish_reason is alone[0].reason


def blocks_needed(job: Job, block_size: int) -> int:
    """Full blocks of the prompt once, and for each sequence or beam its own."""
    whole = -(-(len(job.prompt) + job.max_output - 1) // block_size)
    shared = len(job.prompt) // block_size
    width = job.beam.width if job.beam else job.n
    return whole if job.max_output == 1 else shared + width * (whole - shared)


def lose_worker(table: Bench, same_process: bool, num_blocks: int) -> None:
    scheduler = table.scheduler
    scheduler.lose_worker(table.now_ns)
    scheduler.check()
    table.wire.clear()
    if same_process:
        scheduler.rejoin(table.now_ns)
    else:
        table.worker = FakeWorker(scheduler.limits.block_size, num_blocks)
        assert scheduler.start_epoch(num_blocks, ROOT, table.now_ns) == []
    scheduler.check()


def run(table: Bench, *requests: Request) -> None:
    table.send(*requests)
    table.run()


@pytest.mark.parametrize("width", [1, 2, 4])
def test_the_prompt_is_computed_once_for_all_beams(width: int) -> None:
    table = bench(64, rows=4)
    each = request("x", [0, 1, 1, 0, 1, 0], 6, beam=BeamOptions(width))
    table.send(each)
    ran = 0
    while table.scheduler.has_work:
        plan = table.plan()
        assert plan is not None
        ran += plan.num_tokens
        table.answer()
    # The last tokens are chosen, and never run.
    assert ran == 6 + width * 5
    assert each.hypotheses == search_alone([0, 1, 1, 0, 1, 0], BeamOptions(width), each.stopping, 6)


@pytest.mark.parametrize("block_size", [1, 4, 8])
def test_memory_of_dropped_beams_returns_in_the_same_call(block_size: int) -> None:
    scheduler = Scheduler(limits(rows=4, block_size=block_size), enable_prefix_caching=False)
    table = Bench(scheduler, 128)
    each = request("x", [0, 1, 1, 0, 1, 0], 20, beam=BeamOptions(4))
    table.send(each)
    num_forks = num_dropped = 0
    while scheduler.has_work:
        before = {block for lane in each.family for block in lane.blocks}
        plan = table.plan()
        assert plan is not None
        forks = [fork for fork in plan.forked if fork.parent_row != fork.row]
        num_forks += len(forks)
        assert len(plan.copy_sources) <= len(forks)
        table.answer()
        held = {block for lane in each.family for block in lane.blocks}
        num_dropped += len(before - held)
        assert scheduler.pool is not None
        assert scheduler.pool.num_used == len(held)
    assert num_forks > 4
    assert num_dropped > 4


def test_a_beam_that_goes_on_with_its_likeliest_token_costs_no_message() -> None:
    table = bench(64, rows=4)
    each = request("x", [0, 1, 1], 8, beam=BeamOptions(1))
    table.send(each)
    while table.scheduler.has_work:
        plan = table.plan()
        assert plan is not None
        assert not plan.forked
        assert not len(plan.exception_rows)
        assert plan.serial_rows.tolist() == [0]
        table.answer()


def test_a_search_asks_for_as_many_candidates_as_may_stop_and_more() -> None:
    for eos, count in ((NO_STOP, 6), (frozenset({2}), 6), (frozenset({2, 5}), 9)):
        table = bench(64, rows=4)
        table.send(request("x", [0, 1], 4, stop=eos, beam=BeamOptions(3)))
        plan = table.plan()
        assert plan is not None
        assert (plan.admitted[0].num_candidates, plan.admitted[0].num_samples) == (count, 1)


def test_nothing_is_delivered_before_the_end() -> None:
    table = bench(64, rows=4)
    each = request("x", [0, 1], 6, stop=frozenset({2}), beam=BeamOptions(3, num_returned=3))
    table.send(each)
    finished: list[Request] = []
    while table.scheduler.has_work:
        outcome = table.turn()
        assert outcome is not None
        assert not outcome.tokens
        assert not outcome.requests
        finished += outcome.finished
    assert finished == [each]
    assert each.members == (each,)
    assert len(each.hypotheses) == 3
    assert [h.score for h in each.hypotheses] == sorted(
        (h.score for h in each.hypotheses), reverse=True
    )
    assert each.output_token_ids().tolist() == list(each.hypotheses[0].tokens)


@pytest.mark.parametrize(
    ("width", "n", "field"), [(5, 1, "beam.width"), (0, 1, "beam.width"), (2, 2, "n")]
)
def test_what_cannot_be_searched_is_refused(width: int, n: int, field: str) -> None:
    table = bench(64, rows=4)
    with pytest.raises(InvalidRequestError) as caught:
        table.send(request("x", [0], 4, n=n, beam=BeamOptions(width)))
    assert caught.value.field == field
    assert not table.scheduler.has_work


@pytest.mark.parametrize("turns", range(6))
def test_an_abort_frees_all_beams_at_once(turns: int) -> None:
    table = bench(64, rows=4, depth=2)
    each = request("x", [0, 1] * 5, 9, beam=BeamOptions(4))
    table.send(each)
    for _ in range(turns):
        table.turn()
    table.scheduler.abort(each, table.now_ns)
    table.scheduler.check()
    assert not table.scheduler.has_work
    assert table.scheduler.pool is not None
    assert table.scheduler.pool.num_used == 0
    run(table, request("y", [1, 1], 3, beam=BeamOptions(4)))


def test_a_beam_whose_row_fails_ends_its_search() -> None:
    table = bench(64, rows=4)
    each = request("x", [0, 1] * 5, 9, beam=BeamOptions(4))
    table.send(each)
    for _ in range(3):
        table.turn()
    outcome = table.turn(frozenset({2}))
    assert outcome is not None
    assert outcome.finished == [each]
    assert (each.finish_reason, each.error) == (FinishReason.ERROR, "planted")
    table.run()


def test_a_beam_without_candidates_changes_nothing() -> None:
    table = bench(64, rows=4)
    table.send(request("x", [0, 1], 4, beam=BeamOptions(2)))
    table.plan()
    _, result = table.wire[0]
    empty = Candidates(
        np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float32), np.zeros(1, dtype=np.int32)
    )
    for candidates in (None, empty):
        with pytest.raises(ValueError, match="no candidates of row 0"):
            table.scheduler.apply(StepResult(0, result.tokens, candidates=candidates), 0)
    table.run()


def test_beams_come_back_together_and_share_again() -> None:
    for caching in (True, False):
        scheduler = Scheduler(limits(rows=4), enable_prefix_caching=caching)
        table = Bench(scheduler, 64)
        each = request("x", [0, 1, 1] * 3, 12, beam=BeamOptions(4))
        table.send(each)
        for _ in range(7):
            table.turn()
        scheduler.lose_worker(table.now_ns)
        assert (scheduler.num_running, scheduler.num_waiting) == (0, 1)
        scheduler.rejoin(table.now_ns)
        plan = table.plan()
        assert plan is not None
        assert len(plan.admitted) == 4
        assert len({tuple(row.block_tables[0][:2].tolist()) for row in plan.admitted}) == 1
        table.run()
        assert each.num_preemptions == 1
        assert each.hypotheses == search_alone([0, 1, 1] * 3, BeamOptions(4), each.stopping, 12)


def test_a_lane_waits_while_another_fills_the_blocks_they_share() -> None:
    scheduler = Scheduler(limits(budget=5, rows=4), enable_prefix_caching=False)
    table = Bench(scheduler, 64)
    each = request("x", [0, 1, 1] * 4, 12, beam=BeamOptions(3))
    table.send(each)
    while scheduler.counters.steps < 6:
        table.turn()
    scheduler.lose_worker(table.now_ns)
    scheduler.rejoin(table.now_ns)
    plan = table.plan()
    assert plan is not None
    assert [row.num_new_tokens for row in plan.admitted] == [5, 0, 0]
    assert plan.num_rows == 1
    table.run()
    assert each.hypotheses == search_alone([0, 1, 1] * 4, BeamOptions(3), each.stopping, 12)


@pytest.mark.parametrize("depth", [1, 2])
def test_searches_that_fit_only_one_at_a_time_take_turns(depth: int) -> None:
    table = bench(11, rows=8, depth=depth)
    searches = [request(str(i), [i, 1, 1, 0, 1], 12, beam=BeamOptions(3)) for i in range(3)]
    run(table, *searches)
    assert table.scheduler.counters.preemptions > 0
    for i, each in enumerate(searches):
        alone = search_alone([i, 1, 1, 0, 1], BeamOptions(3), each.stopping, 12)
        assert each.hypotheses == alone
