"""KV groups in the scheduler: windows hold few blocks, and change no token."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_worker import generate_alone, search_alone
from scheduler_bench import Bench, bench, grouped_bench, limits, request
from scheduler_svc.core.beam_options import BeamOptions
from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.errors import NeverFitsError
from scheduler_svc.core.free_block_queue import NULL_BLOCK
from scheduler_svc.core.group_blocks import num_wanted
from scheduler_svc.core.kv_events import BlockRemoved, BlocksStored, KvEventLog
from scheduler_svc.core.kv_groups import FULL_ATTENTION, KvGroup
from scheduler_svc.core.kv_memory import KvMemory
from scheduler_svc.core.length_limit import length_limit
from scheduler_svc.core.request import FinishReason, Request
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.victims import VICTIM_POLICIES
from scheduler_svc.core.waiting_queue import waiting_queue

NO_STOP: frozenset[int] = frozenset()
FULL = KvGroup()

kv_groups = st.lists(
    st.one_of(
        st.just(FULL),
        st.builds(KvGroup, window=st.integers(1, 9)),
        st.builds(KvGroup, chunk=st.integers(1, 9)),
    ),
    min_size=1,
    max_size=3,
).map(tuple)


@dataclass
class Job:
    prompt: list[int]
    n: int
    max_output: int
    arrives: int
    aborted: int | None
    read_cache: bool
    beam: BeamOptions | None

    def request(self, name: str) -> Request:
        return request(
            name,
            self.prompt,
            self.max_output,
            n=1 if self.beam else self.n,
            read_cache=self.read_cache,
            beam=self.beam,
        )

    def alone(self, member: Request) -> list[int]:
        if self.beam is None:
            return generate_alone(self.prompt, self.max_output, NO_STOP, member.index)
        found = search_alone(self.prompt, self.beam, member.stopping, self.max_output)
        return list(found[0].tokens)


jobs = st.builds(
    Job,
    prompt=st.lists(st.integers(0, 1), min_size=1, max_size=20),
    n=st.sampled_from([1, 1, 2, 4]),
    max_output=st.integers(1, 9),
    arrives=st.integers(0, 8),
    aborted=st.none() | st.none() | st.integers(0, 15),
    read_cache=st.booleans(),
    beam=st.none() | st.none() | st.builds(BeamOptions, width=st.integers(1, 4)),
)


def smallest_pool(load: list[Job], scheduler: Scheduler, groups: tuple[KvGroup, ...]) -> int:
    """Return the fewest blocks in which each of some requests fits."""
    num_blocks = 1
    for job in load:
        while True:
            pool = KvMemory().new_pool(num_blocks, groups)
            try:
                length_limit(job.request("x"), scheduler.limits, pool)
            except NeverFitsError:
                num_blocks += 1
            else:
                break
    return num_blocks


@settings(deadline=None, max_examples=300)
@given(
    groups=kv_groups,
    load=st.lists(jobs, min_size=1, max_size=5),
    budget=st.integers(1, 16),
    threshold=st.sampled_from([0, 1, 5]),
    depth=st.integers(1, 2),
    block_size=st.sampled_from([1, 2, 3, 4]),
    spare_blocks=st.integers(0, 12),
    losses=st.lists(st.tuples(st.integers(0, 20), st.booleans()), max_size=2),
    failing=st.sets(st.tuples(st.integers(0, 20), st.integers(0, 5)), max_size=2),
    caching=st.booleans(),
    victim=st.sampled_from(["cheapest", "newest"]),
)
def test_no_groups_change_the_tokens_of_a_request(
    groups: tuple[KvGroup, ...],
    load: list[Job],
    budget: int,
    threshold: int,
    depth: int,
    block_size: int,
    spare_blocks: int,
    losses: list[tuple[int, bool]],
    failing: set[tuple[int, int]],
    caching: bool,
    victim: str,
) -> None:
    scheduler = Scheduler(
        limits(
            budget,
            rows=6,
            depth=depth,
            block_size=block_size,
            long_prefill_token_threshold=threshold,
        ),
        enable_prefix_caching=caching,
        waiting=waiting_queue("fcfs"),
        choose_victim=VICTIM_POLICIES[victim],
    )
    num_blocks = smallest_pool(load, scheduler, groups) + spare_blocks
    table = Bench(scheduler, num_blocks, groups)
    requests = [job.request(str(i)) for i, job in enumerate(load)]
    turns = 0
    while scheduler.has_work or table.wire or turns <= 8:
        for job, each in zip(load, requests, strict=True):
            if job.arrives == turns:
                table.send(each)
            if job.aborted == turns and each.sequence >= 0:
                scheduler.abort(each, table.now_ns)
                scheduler.check()
        for turn, same_process in losses:
            if turn == turns:
                scheduler.lose_worker(table.now_ns)
                scheduler.check()
                if same_process:
                    table.wire.clear()
                    scheduler.rejoin(table.now_ns)
                else:
                    assert table.join() == []
        table.turn(frozenset(row for turn, row in failing if turn == turns))
        assert_bounded(table)
        turns += 1
        assert turns < 1000
    assert scheduler.pool is not None
    assert scheduler.pool.num_free == num_blocks
    for job, each in zip(load, requests, strict=True):
        for member in each.members:
            output = member.output_token_ids().tolist()
            alone = job.alone(member)
            if member.finish_reason is FinishReason.LENGTH:
                assert output == alone
            else:
                assert failing or job.aborted is not None
                # A search that did not end has chosen nothing.
                assert job.beam is not None or output == alone[: len(output)]


def assert_bounded(table: Bench) -> None:
    """Prove that no request holds more blocks of a group than a window and a step need."""
    scheduler, groups = table.scheduler, table.groups
    bounds = scheduler.limits
    for each in held(scheduler):
        if each.root.beam is not None:
            continue  # Beams that come back take whole tables.
        for number, group in enumerate(groups):
            kept = sum(block != NULL_BLOCK for block in each.blocks[number :: len(groups)])
            assert kept <= group.most_blocks(
                bounds.max_model_len, bounds.max_step_row_tokens, bounds.block_size
            )


def held(scheduler: Scheduler) -> list[Request]:
    return list(scheduler._state.rows.running)


def blocks_of(each: Request, num_groups: int, group: int = 0) -> list[int]:
    return list(each.blocks[group::num_groups])


def pool_of(table: Bench) -> BlockPool:
    assert table.scheduler.pool is not None
    return table.scheduler.pool


def num_null(each: Request, num_groups: int = 1, group: int = 0) -> int:
    return blocks_of(each, num_groups, group).count(NULL_BLOCK)


def run_one(table: Bench, prompt: list[int], count: int = 1) -> Request:
    each = request("x", prompt, count)
    table.send(each)
    table.run()
    return each


def test_34_a_request_goes_on_behind_a_hit_whose_window_alone_is_cached() -> None:
    table = grouped_bench((KvGroup(window=4),), 12, block_size=2, length=80)
    prompt = list(range(24))
    run_one(table, prompt)
    pool = pool_of(table)
    names = table.scheduler._state.prefixes
    probe = request("probe", [*prompt, 7], 1)
    for name in names.names(probe)[:9]:
        block = pool.lookup(name)
        assert block is not None
        pool.retract(block)
    hits = names.find(probe, pool)
    assert len(hits) == 12
    # The two tokens of the last block and one before it: two blocks.
    assert [block != NULL_BLOCK for block in hits] == [False] * 10 + [True] * 2


@pytest.mark.parametrize(("computed", "unseen"), [(4, 0), (5, 1), (6, 1), (7, 2), (11, 4)])
def test_35_blocks_before_the_window_are_given_back_the_later_first(
    computed: int, unseen: int
) -> None:
    table = grouped_bench((KvGroup(window=4),), 16, block_size=2)
    each = request("x", [5] * computed, 4)
    table.send(each)
    table.turn()
    before = list(each.blocks)
    assert num_null(each) == 0
    table.plan()
    assert num_null(each) == unseen
    pool = pool_of(table)
    gone = before[:unseen]
    assert [block for block in pool._idle if block in gone] == gone[::-1]


@pytest.mark.parametrize(("computed", "unseen"), [(4, 2), (6, 2), (12, 6)])
def test_36_blocks_of_earlier_chunks_are_given_back(computed: int, unseen: int) -> None:
    table = grouped_bench((KvGroup(chunk=4),), 16, block_size=2)
    each = request("x", [5] * computed, 4)
    table.send(each)
    table.turn()
    table.plan()
    assert num_null(each) == unseen


@pytest.mark.parametrize("depth", [1, 2])
def test_37_a_prompt_gives_back_what_its_first_decode_does_not_see_once(depth: int) -> None:
    table = grouped_bench(
        (KvGroup(window=16),), 16, budget=128, depth=depth, block_size=16, length=256
    )
    each = request("x", [5] * 100, 4)
    table.send(each)
    table.plan()
    assert num_null(each) == 0
    if depth == 1:
        table.answer()
    # The first decode sees positions 85 to 100. It may be planned while the prompt still runs.
    table.plan()
    pool = pool_of(table)
    assert (num_null(each), pool.num_used) == (5, 2)
    table.answer()
    table.plan()
    assert (num_null(each), pool.num_used) == (5, 2)


@pytest.mark.parametrize(
    ("group", "in_flight", "blocks"),
    [
        (KvGroup(window=1024), 1024, 129),
        (KvGroup(window=1024), 2048, 193),
        (KvGroup(chunk=1024), 1024, 128),
        (KvGroup(chunk=1024), 2048, 192),
    ],
)
def test_38_no_length_needs_more_than_a_window_and_a_step(
    group: KvGroup, in_flight: int, blocks: int
) -> None:
    for num_blocks in (blocks, blocks - 1):
        table = grouped_bench((group,), num_blocks, budget=in_flight, block_size=16, length=20_000)
        each = request("x", [5] * 9_000, 10_000)
        if num_blocks == blocks:
            table.send(each)
        else:
            with pytest.raises(NeverFitsError):
                table.send(each)


def test_39_a_prompt_needs_its_length_in_one_group_and_a_window_in_the_other() -> None:
    groups = (FULL, KvGroup(window=64))
    # 77 usable blocks: 64 hold 1024 tokens, 13 a window and a step.
    table = grouped_bench(groups, 77, budget=128, block_size=16, length=1025)
    each = request("x", list(range(512)), 512)
    table.send(each)
    table.run()
    assert each.num_output_tokens == 512
    assert each.num_preemptions == 0
    with pytest.raises(NeverFitsError):
        grouped_bench(groups, 76, budget=128, block_size=16, length=1025).send(
            request("x", [5] * 512, 513)
        )
    assert num_wanted(512, [], table.scheduler.limits, pool_of(table)) == 32 + 13
    with pytest.raises(NeverFitsError):
        grouped_bench(groups, 4, budget=128, block_size=16, length=1025).send(
            request("x", [5] * 256, 1)
        )


def test_40_idle_hits_are_wanted_too_and_null_ones_are_not() -> None:
    for groups, wanted in (((FULL,), 20), ((KvGroup(window=80),), 15)):
        table = grouped_bench(groups, 20, budget=256, block_size=16, length=400)
        prompt = list(range(320))
        run_one(table, prompt[:160])
        pool, prefixes = pool_of(table), table.scheduler._state.prefixes
        hits = prefixes.find(request("y", prompt, 1), pool)
        assert (len(hits), hits.count(NULL_BLOCK)) == (10, 20 - wanted)
        assert num_wanted(320, hits, table.scheduler.limits, pool) == wanted


def test_41_an_idle_hit_is_wanted_and_not_allocated() -> None:
    table = bench(2)
    run_one(table, [1, 2, 3, 4])
    table.send(each := request("y", [1, 2, 3, 4, 5], 1))
    names = pool_of(table)
    assert num_wanted(5, [], table.scheduler.limits, names) == 2
    table.plan()
    assert each.admitted_tokens == 4
    assert names.num_used == 2
    table.run()


@pytest.mark.parametrize(
    "groups", [(FULL, KvGroup(window=6)), (KvGroup(window=6), FULL, KvGroup(chunk=8))]
)
def test_42_no_block_is_handed_out_twice_when_hits_die_next(groups: tuple[KvGroup, ...]) -> None:
    width = len(groups)
    table = grouped_bench(groups, 8 * width, length=40)
    pool = pool_of(table)
    prompt = list(range(16))
    run_one(table, prompt)
    # Its blocks die first now: whoever else is evicted came later.
    run_one(table, [50 + token for token in range(12)])
    for hit in (16, None):
        each = request("y", [*prompt, *range(90, 97)], 9)
        others = [request(name, [70 + len(name)], 24) for name in ("z", "zz")]
        table.send(each, *others)
        table.plan()
        assert hit in (each.admitted_tokens, None)
        while table.scheduler.has_work:
            for one in held(table.scheduler):
                assert all(pool.num_users(block) >= 1 for block in one.blocks)
            ids = [block for one in held(table.scheduler) for block in one.blocks if block]
            assert len(set(ids)) == len(ids)
            table.turn()
        for one in (each, *others):
            prompted = one.tokens[: one.num_prompt_tokens].tolist()
            assert one.output_token_ids().tolist() == generate_alone(
                prompted, one.num_output_tokens, NO_STOP
            )
    assert table.scheduler.counters.preemptions > 0


def test_a_windowed_request_of_any_length_runs_in_a_window_and_a_step() -> None:
    table = grouped_bench((KvGroup(window=5),), 4, budget=8, length=512)
    each = request("x", [0, 1] * 30, 400)
    table.send(each)
    table.run()
    assert each.num_preemptions == 0
    assert each.output_token_ids().tolist() == generate_alone([0, 1] * 30, 400, NO_STOP)


def test_what_a_failed_row_wrote_is_in_doubt_behind_a_window_too() -> None:
    """Of a block that another row hit, read and gave back before the failure is known."""
    table = grouped_bench((KvGroup(window=2),), 16, depth=2, rows=2, length=40, budget=8)
    first, second = request("a", [1] * 4, 6), request("b", [1] * 4 + [0, 0, 1], 6)
    table.send(first, second)
    table.plan(frozenset({0}))
    assert second.admitted_tokens == 4
    table.plan()
    assert NULL_BLOCK in second.blocks
    table.answer()
    assert first.finish_reason is FinishReason.ERROR
    assert second.row is None
    table.run()
    assert second.output_token_ids().tolist() == generate_alone([1] * 4 + [0, 0, 1], 6, NO_STOP)


def test_what_a_row_in_doubt_wrote_and_gave_back_cannot_be_hit() -> None:
    table = grouped_bench((KvGroup(window=2),), 16, depth=2, rows=2, length=40, budget=16)
    prompt = [1] * 4 + [0] * 4 + [1]
    first, second = request("a", [1] * 4, 6), request("b", prompt, 6)
    table.send(first, second)
    table.plan(frozenset({0}))
    written = table.scheduler._state.prefixes.names(second)[1]
    assert second.admitted_tokens == 4
    assert pool_of(table).lookup(written) == second.blocks[1]
    table.plan()
    assert second.blocks[:2] == [NULL_BLOCK] * 2
    table.answer()
    assert pool_of(table).lookup(written) is None
    table.run()
    assert second.output_token_ids().tolist() == generate_alone(prompt, 6, NO_STOP)


def test_events_name_their_group_and_a_parent_that_is_not_held() -> None:
    events = KvEventLog()
    groups = (FULL, KvGroup(window=4))
    scheduler = Scheduler(limits(budget=4), memory=KvMemory(events=events))
    table = Bench(scheduler, 12, groups)
    events.take()
    each = request("x", list(range(12)), 1)
    table.send(each)
    for _ in range(3):
        table.plan()
        table.answer()
    stored = [event for event in events.take() if isinstance(event, BlocksStored)]
    assert [event.group for event in stored] == [0, 1] * 3
    assert [event.names for event in stored[::2]] == [event.names for event in stored[1::2]]
    # The block before was given back, and its name is the parent's all the same.
    assert [event.parent for event in stored[3::2]] == [event.names[-1] for event in stored[1:-1:2]]
    pool = pool_of(table)
    pool.allocate(pool.num_free)
    removed = [event for event in events.take() if isinstance(event, BlockRemoved)]
    assert sorted(removed, key=str) == sorted(
        (BlockRemoved(event.names[0], event.group) for event in stored), key=str
    )


def test_a_prompt_that_waits_leaves_the_rest_of_another_its_blocks() -> None:
    groups = (FULL, KvGroup(window=4))
    # 32 tokens take 8 blocks, and 4 at a time in the window; those of 8 take 2 and 2.
    table = grouped_bench(groups, 15, budget=16, long_prefill_token_threshold=8, length=40)
    long, short = request("long", list(range(32)), 1), request("short", [7] * 8, 1)
    table.send(long, short)
    table.plan()
    # 11 blocks are free, of which the rest of the long prompt takes 8.
    assert pool_of(table).num_free == 11
    assert short.row is None
    table.run()
    assert table.scheduler.counters.preemptions == 0
    assert short.finish_reason is FinishReason.LENGTH


def test_a_group_that_sees_all_twice_takes_twice_the_blocks() -> None:
    one, two = grouped_bench(FULL_ATTENTION, 8), grouped_bench((FULL, FULL), 16)
    for table in (one, two):
        each = run_one(table, [1] * 9, 20)
        assert each.num_preemptions == 0
    with pytest.raises(NeverFitsError):
        grouped_bench((FULL, FULL), 15).send(request("x", [1] * 9, 24))
