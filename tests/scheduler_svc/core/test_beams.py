"""Beams on shared blocks: each search finds what it finds alone, whatever happens around it."""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from fake_worker import FakeWorker, generate_alone, search_alone
from scheduler_bench import ROOT, Bench, limits, request
from scheduler_svc.core.request import BeamOptions, EarlyStopping, FinishReason, Request
from scheduler_svc.core.scheduler import Scheduler
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
