"""Sequences of one request: each gets exactly the tokens it gets alone, whatever they share."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_worker import FakeWorker, generate_alone
from scheduler_bench import ROOT, Bench, bench, limits, request
from scheduler_svc.core.errors import InvalidRequestError, NeverFitsError
from scheduler_svc.core.request import FinishReason, Request
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.victims import VICTIM_POLICIES
from scheduler_svc.core.waiting_queue import waiting_queue

NO_STOP: frozenset[int] = frozenset()


@dataclass
class Job:
    prompt: list[int]
    n: int
    max_output: int
    arrives: int
    aborted: dict[int, int]
    """Turn of each member's abort."""
    stops: bool
    read_cache: bool
    priority: int
    tenant: str

    @property
    def stop(self) -> frozenset[int]:
        return frozenset({2}) if self.stops else NO_STOP

    def alone(self, index: int) -> list[int]:
        return generate_alone(self.prompt, self.max_output, self.stop, index)

    def request(self, name: str) -> Request:
        return request(
            name,
            self.prompt,
            self.max_output,
            stop=self.stop,
            n=self.n,
            read_cache=self.read_cache,
            priority=self.priority,
            tenant=self.tenant,
        )


jobs = st.builds(
    Job,
    prompt=st.lists(st.integers(0, 1), min_size=1, max_size=10),
    n=st.integers(1, 6),
    max_output=st.integers(1, 7),
    arrives=st.integers(0, 8),
    aborted=st.dictionaries(st.integers(0, 5), st.integers(0, 12), max_size=2),
    stops=st.booleans(),
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
    spare_blocks=st.integers(0, 20),
    losses=st.lists(st.tuples(st.integers(0, 20), st.booleans()), max_size=2),
    failing=st.sets(st.tuples(st.integers(0, 20), st.integers(0, 6)), max_size=2),
    caching=st.booleans(),
    policy=st.sampled_from(["fcfs", "priority", "fair"]),
    victim=st.sampled_from(["cheapest", "newest"]),
)
def test_each_member_gets_the_tokens_it_gets_alone(
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
        limits(budget, rows=7, depth=depth, block_size=block_size),
        enable_prefix_caching=caching,
        waiting=waiting_queue(policy),
        choose_victim=VICTIM_POLICIES[victim],
    )
    num_blocks = spare_blocks + max(blocks_needed(job, block_size) for job in load)
    table = Bench(scheduler, num_blocks)
    requests = [job.request(str(i)) for i, job in enumerate(load)]
    delivered: dict[Request, list[int]] = {m: [] for each in requests for m in each.members}
    finished: list[Request] = []
    turns = 0
    while scheduler.has_work or table.wire or turns <= 8:
        for job, each in zip(load, requests, strict=True):
            if job.arrives == turns:
                table.send(each)
            for index, turn in job.aborted.items():
                if turn == turns and each.sequence >= 0 and index < job.n:
                    scheduler.abort(each.members[index], table.now_ns)
                    scheduler.check()
        for turn, same_process in losses:
            if turn == turns:
                lose_worker(table, same_process, num_blocks)
        outcome = table.turn(frozenset(row for turn, row in failing if turn == turns))
        if outcome is not None:
            for member, token in zip(outcome.requests, outcome.tokens, strict=True):
                delivered[member].append(token)
            finished += outcome.finished
        turns += 1
        assert turns < 1000
    assert scheduler.pool is not None
    assert scheduler.pool.num_free == num_blocks
    assert len(set(finished)) == len(finished)
    for job, each in zip(load, requests, strict=True):
        for member in each.members:
            output = member.output_token_ids().tolist()
            alone = job.alone(member.index)
            assert delivered[member] == output
            if member.finish_reason in {FinishReason.STOP, FinishReason.LENGTH}:
                assert output == alone
                assert member in finished
            else:
                assert failing or job.aborted
                assert output == alone[: len(output)]


def blocks_needed(job: Job, block_size: int) -> int:
    """Full blocks of the prompt once, and for each sequence its own."""
    whole = -(-(len(job.prompt) + job.max_output - 1) // block_size)
    shared = len(job.prompt) // block_size
    if job.max_output == 1:
        return whole
    return shared + job.n * (whole - shared)


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


def run_and_count(table: Bench, each: Request) -> tuple[int, int]:
    """Run one family to its end; return the prompt tokens that ran and the most blocks in use."""
    table.send(each)
    ran = most = 0
    while table.scheduler.has_work:
        while (plan := table.plan()) is not None:
            ran += sum(row.num_new_tokens for row in plan.admitted)
            assert table.scheduler.pool is not None
            most = max(most, table.scheduler.pool.num_used)
        table.answer()
    return ran, most


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("n", [1, 2, 4, 6])
def test_the_prompt_is_computed_once_and_each_fork_copies_one_block_at_most(
    n: int, depth: int
) -> None:
    table = bench(64, rows=6, depth=depth)
    each = request("x", [0, 1, 1, 0, 1, 0], 9, n=n)
    ran, most = run_and_count(table, each)
    assert ran == 6
    assert table.worker.num_copies == n - 1
    # One full block is shared. Behind it each has its own: 6 + 8 slots are 4 blocks.
    assert most == 1 + n * 3
    for member in each.members:
        assert member.output_token_ids().tolist() == generate_alone(
            [0, 1, 1, 0, 1, 0], 9, NO_STOP, member.index
        )


@pytest.mark.parametrize("depth", [1, 2])
def test_nobody_copies_a_block_that_the_prompt_fills(depth: int) -> None:
    table = bench(64, rows=6, depth=depth)
    ran, most = run_and_count(table, request("x", [0, 1, 1, 0, 1, 0, 0, 0], 9, n=5))
    assert (ran, most) == (8, 2 + 5 * 2)
    assert table.worker.num_copies == 0


def test_the_copy_travels_with_the_fork_and_the_last_owner_writes_in_place() -> None:
    table = bench(64, rows=4)
    each = request("x", [0, 1, 1, 0, 1, 0], 5, n=3)
    table.send(each)
    table.turn()
    assert [member.num_tokens for member in each.members] == [7, 7, 7]
    plan = table.plan()
    assert plan is not None
    prompt, tail = each.members[2].blocks
    assert plan.copy_sources.tolist() == [tail, tail]
    assert plan.copy_destinations.tolist() == [m.blocks[1] for m in each.members[:2]]
    assert [(f.row, f.parent_row, f.sequence_index, f.num_blocks) for f in plan.forked] == [
        (0, 0, 0, 1),
        (1, 0, 1, 1),
        (2, 0, 2, 2),
    ]
    assert [f.last_token for f in plan.forked] == [None, *(m.tokens[6] for m in each.members[1:])]
    assert all(member.blocks[0] == prompt for member in each.members)
    assert plan.exception_rows.tolist() == []


def test_a_member_that_stops_at_once_never_gets_a_row() -> None:
    alone = [generate_alone([0, 1], 1, NO_STOP, index)[0] for index in range(4)]
    stop = alone[0]
    assert len(set(alone)) > 1
    table = bench(rows=4)
    each = request("x", [0, 1], 5, n=4, stop=frozenset({stop}))
    table.send(each)
    outcome = table.turn()
    assert outcome is not None
    assert outcome.tokens == alone
    assert outcome.requests == [*each.members]
    assert outcome.finished == [m for m, t in zip(each.members, alone, strict=True) if t == stop]
    assert table.scheduler.num_running == sum(token != stop for token in alone)
    # The root has ended: another goes on in its row.
    plan = table.plan()
    assert plan is not None
    assert not len(plan.released_rows)
    assert plan.forked[0].row == plan.forked[0].parent_row == 0
    table.run()


def test_a_family_waits_until_all_its_rows_are_free() -> None:
    table = bench(64, rows=4)
    first, family, last = (
        request("a", [0], 4),
        request("b", [0, 1], 3, n=4),
        request("c", [1, 1], 3),
    )
    table.send(first, family)
    table.turn()
    assert (table.scheduler.num_running, table.scheduler.num_waiting) == (1, 1)
    while first.finish_reason is None:
        table.turn()
    table.send(last)
    table.plan()
    # The three free rows are kept for the family.
    assert (table.scheduler.num_running, table.scheduler.num_waiting) == (1, 1)
    table.run()


def test_before_the_fork_the_root_takes_all_along_and_after_it_each_ends_alone() -> None:
    table = bench(64, rows=4)
    early, late = request("a", [0, 1], 5, n=3), request("b", [1, 1], 5, n=3)
    table.send(early)
    table.plan()
    table.scheduler.abort(early, table.now_ns)
    assert {member.finish_reason for member in early.members} == {FinishReason.ABORT}
    assert not table.scheduler.has_work
    table.answer()
    table.send(late)
    table.turn()
    table.scheduler.abort(late, table.now_ns)
    table.scheduler.check()
    assert [m.finish_reason for m in late.members] == [FinishReason.ABORT, None, None]
    table.scheduler.finish(late.members[2], 1, table.now_ns)
    table.run()
    assert [m.finish_reason for m in late.members] == [
        FinishReason.ABORT,
        FinishReason.LENGTH,
        FinishReason.STOP,
    ]
    assert late.members[1].output_token_ids().tolist() == generate_alone([1, 1], 5, NO_STOP, 1)


def test_all_members_can_be_aborted_at_once() -> None:
    table = bench(64, rows=4)
    each = request("a", [0, 1], 5, n=3)
    table.send(each)
    table.turn()
    table.scheduler.abort_family(each, table.now_ns)
    table.scheduler.check()
    assert not table.scheduler.has_work
    assert table.scheduler.pool is not None
    assert table.scheduler.pool.num_used == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_a_parent_that_ends_before_its_fork_was_sent_hands_its_row_on(depth: int) -> None:
    table = bench(64, rows=4, depth=depth)
    each = request("a", [0, 1], 5, n=3)
    table.send(each)
    table.plan()
    table.answer()
    table.scheduler.abort(each, table.now_ns)
    table.scheduler.check()
    plan = table.plan()
    assert plan is not None
    assert not len(plan.released_rows)
    assert [(f.row, f.parent_row, f.sequence_index) for f in plan.forked] == [(0, 0, 1), (2, 0, 2)]
    table.run()
    for member in each.members[1:]:
        alone = generate_alone([0, 1], 5, NO_STOP, member.index)
        assert member.output_token_ids().tolist() == alone


@pytest.mark.parametrize("n", [0, 5, 10**9])
def test_more_sequences_than_rows_are_refused(n: int) -> None:
    table = bench(64, rows=4)
    with pytest.raises(InvalidRequestError, match=f"n is {n}, must be 1 to 4") as caught:
        table.send(request("a", [0, 1], 5, n=n))
    assert caught.value.field == "n"
    assert not table.scheduler.has_work


def test_a_family_whose_prompt_is_longer_than_the_pool_is_refused() -> None:
    with pytest.raises(NeverFitsError):
        bench(2).send(request("a", [0] * 12, 1, n=2))


def test_a_family_fits_if_its_shared_and_its_own_blocks_do() -> None:
    # A prompt of 9 tokens: 2 blocks are shared, and each sequence of 5 tokens has 2 of its own.
    for num_blocks, fits in ((8, True), (7, False)):
        table = bench(num_blocks, rows=4)
        each = request("a", [0] * 9, 5, n=3)
        if fits:
            table.send(each)
            table.run()
            assert table.scheduler.counters.preemptions == 0
        else:
            with pytest.raises(NeverFitsError, match="for each of 3 sequences"):
                table.send(each)
    table = bench(7, rows=4)
    each = request("a", [0] * 9, None, n=3)
    table.send(each)
    table.run()
    # One block of its own each: 3 tokens more are stored, and one is sampled behind them.
    assert [member.num_output_tokens for member in each.members] == [4, 4, 4]


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_a_family_whose_prompt_alone_fills_more_than_the_pool_is_refused(num_blocks: int) -> None:
    table = bench(num_blocks, rows=4)
    with pytest.raises(NeverFitsError, match=f"the whole pool has {4 * num_blocks}"):
        table.send(request("a", [0] * 16, 1, n=3))


@pytest.mark.parametrize("caching", [True, False])
def test_a_resumed_member_shares_what_its_siblings_hold(caching: bool) -> None:
    scheduler = Scheduler(limits(rows=4), enable_prefix_caching=caching)
    table = Bench(scheduler, 64)
    each = request("a", [0, 1, 1] * 3, 12, n=3)
    table.send(each)
    for _ in range(4):
        table.turn()
    scheduler.lose_worker(table.now_ns)
    scheduler.rejoin(table.now_ns)
    plan = table.plan()
    assert plan is not None
    assert len(plan.admitted) == 3
    shared = {tuple(row.block_tables[0][:2].tolist()) for row in plan.admitted}
    assert len(shared) == 1
    assert scheduler.pool is not None
    assert scheduler.pool.num_used < sum(len(member.blocks) for member in each.members)
    table.run()
    for member in each.members:
        alone = generate_alone([0, 1, 1] * 3, 12, NO_STOP, member.index)
        assert member.output_token_ids().tolist() == alone
