"""Pool, free queue and prefix cache do what the reference's scenarios 1 to 29 and 40, 41 say.

The reference counts the null block in its N; here `num_blocks` are the usable ones, N - 1. Block
tables are read from the fake worker, which follows plans as a real one does.
"""

import pytest

from fake_worker import generate_alone
from scheduler_bench import Bench, limits, request
from scheduler_svc.core.block_hash import BlockHash
from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.free_block_queue import BlockId, FreeBlockQueue
from scheduler_svc.core.request import Request
from scheduler_svc.core.scheduler import Scheduler

COMMON = [7] * 48
"""Three full blocks."""


def wide(
    num_blocks: int, block_size: int = 16, budget: int = 1000, *, caching: bool = True
) -> Bench:
    limit = limits(budget, rows=8, length=2048, block_size=block_size)
    return Bench(Scheduler(limit, enable_prefix_caching=caching), num_blocks)


def pool_of(table: Bench) -> BlockPool:
    assert table.scheduler.pool is not None
    return table.scheduler.pool


def free_order(table: Bench) -> list[int]:
    pool = pool_of(table)
    return [int(block) for block in (*pool._empty, *pool._idle)]


def blocks_of(table: Bench, each: Request) -> list[int]:
    assert each.row is not None
    return table.worker.rows[each.row].tables[0]


def admit(table: Bench, each: Request) -> list[int]:
    """Run the step that admits a request alone and return its block table."""
    table.send(each)
    table.turn()
    return blocks_of(table, each)


def drop(table: Bench, *requests: Request) -> None:
    for each in requests:
        table.scheduler.abort(each, table.now_ns)


def named(table: Bench) -> set[int]:
    """Blocks that have a name."""
    return {block for block, name in enumerate(pool_of(table)._names) if name is not None}


def queue_of(*ids: int) -> FreeBlockQueue:
    queue = FreeBlockQueue(max(ids))
    queue.pop(max(ids))
    queue.push([BlockId(i) for i in ids])
    return queue


def test_01_a_removed_id_comes_back_at_the_tail() -> None:
    queue = FreeBlockQueue(5)
    assert queue.pop(1) == [1]
    queue.remove(BlockId(3))
    queue.push([BlockId(3)])
    assert queue.pop(4) == [2, 4, 5, 3]
    with pytest.raises(IndexError):
        queue.pop(1)


def test_02_groups_are_appended_in_their_order() -> None:
    queue = FreeBlockQueue(6)
    queue.pop(6)
    for group in ([], [6], [4, 5], [1, 2, 3]):
        queue.push([BlockId(i) for i in group])
    assert list(queue) == [6, 4, 5, 1, 2, 3]
    assert len(queue) == 6


def test_03_a_later_group_at_the_head_goes_before_an_earlier_one() -> None:
    queue = FreeBlockQueue(5)
    queue.pop(5)
    queue.push([BlockId(3)])
    queue.push_front([BlockId(4), BlockId(5)])
    queue.push_front([BlockId(1), BlockId(2)])
    assert queue.pop(5) == [1, 2, 4, 5, 3]


def test_04_many_are_taken_from_the_head_at_once() -> None:
    queue = queue_of(1, 3, 5, 4, 6, 2)
    assert [queue.pop(count) for count in range(4)] == [[], [1], [3, 5], [4, 6, 2]]


def test_05_a_name_lives_as_long_as_one_of_its_blocks() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(4)
    names = [BlockHash(name) for name in (b"h0", b"h1", b"h2", b"h0")]
    for block, name in zip(blocks, names, strict=True):
        pool.publish(block, name)
    pool.retract(blocks[1])
    assert [pool.lookup(BlockHash(name)) for name in (b"h0", b"h1", b"h2")] == [1, None, 3]
    pool.retract(blocks[0])
    assert pool.lookup(BlockHash(b"h0")) == blocks[3]


def test_06_only_full_blocks_are_named() -> None:
    table = wide(5, block_size=4, budget=8)
    each = request("x", list(range(14)), 6)
    table.send(each)
    table.turn()
    assert len(named(table)) == 2
    table.turn()
    assert len(named(table)) == 3
    assert len(blocks_of(table, each)) == 4


def test_07_a_reused_block_has_no_name_until_it_is_full() -> None:
    table = wide(1)
    table.send(request("full", [1] * 16, 1))
    table.run()
    assert named(table) == {1}
    admit(table, request("shorter", [1] * 15, 2))
    assert named(table) == set()


def test_08_more_than_is_free_is_refused() -> None:
    pool = BlockPool(3)
    with pytest.raises(IndexError):
        pool.allocate(4)
    assert pool.num_free == 3


def test_09_to_13_a_prefix_is_shared_kept_and_evicted_last() -> None:
    table = wide(10)
    first = request("first", [*COMMON, *range(7)], 100)
    assert admit(table, first) == [1, 2, 3, 4]
    assert named(table) == {1, 2, 3}

    second = request("second", [*COMMON, *range(5, 10)], 100)
    assert admit(table, second) == [1, 2, 3, 5]
    assert second.num_cached_tokens == 48
    assert [pool_of(table)._users[block] for block in (1, 2, 3)] == [2, 2, 2]
    assert pool_of(table).num_free == 5

    drop(table, first, second)
    # Both left a block without a name; the one given back last is taken first.
    assert free_order(table) == [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]

    third = request("third", [*COMMON, *range(20, 25)], 2)
    assert admit(table, third) == [1, 2, 3, 5]
    assert third.num_cached_tokens == 48
    assert pool_of(table).num_free == 6
    drop(table, third)

    unrelated = request("unrelated", list(range(1000, 1160)), 1)
    table.send(unrelated)
    assert table.plan() is not None
    assert blocks_of(table, unrelated) == [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]
    assert pool_of(table).num_free == 0


def test_14_the_deepest_blocks_of_a_prefix_die_first() -> None:
    table = wide(10)
    first = request("first", [*COMMON, *range(39)], 9)
    second = request("second", list(range(200, 248)), 9)
    # The last token of a prompt is stored in its step; what it samples is not.
    table.send(first, second)
    table.turn()
    assert blocks_of(table, first) == [1, 2, 3, 4, 5, 6]
    assert blocks_of(table, second)[:3] == [7, 8, 9]
    assert pool_of(table).num_free == 1
    drop(table, first)
    assert free_order(table) == [6, 10, 5, 4, 3, 2, 1]
    drop(table, second)
    assert free_order(table) == [6, 10, 5, 4, 3, 2, 1, 9, 8, 7]
    third = request("third", COMMON[:35], 9)
    assert admit(table, third) == [1, 2, 6]
    assert pool_of(table).num_free == 7


def test_15_a_hit_is_never_evicted_for_the_request_that_hits_it() -> None:
    table = wide(2)
    for name, token in (("a", 1), ("b", 2)):
        table.send(request(name, [token] * 16, 1))
        table.run()
    hitting = request("a again", [1] * 16 + [3] * 16, 1)
    table.send(hitting)
    table.plan()
    assert blocks_of(table, hitting) == [1, 2]
    assert hitting.num_cached_tokens == 16


def test_16_the_last_token_of_a_cached_prompt_runs_again() -> None:
    table = wide(10)
    for name, cached in (("first", 0), ("second", 32)):
        each = request(name, COMMON, 1)
        table.send(each)
        table.run()
        assert each.num_cached_tokens == cached


def test_17_without_caching_nothing_is_found() -> None:
    table = wide(4, block_size=4, caching=False)
    first = request("first", [1] * 10, 2)
    assert len(admit(table, first)) == 3
    drop(table, first)
    second = request("second", [1] * 15, 2)
    assert len(admit(table, second)) == 4
    assert second.num_cached_tokens == 0
    assert named(table) == set()
    table.send(request("third", [1] * 4, 1))
    assert table.plan() is not None
    assert table.scheduler.num_waiting == 1


def test_18_a_block_gets_its_name_when_decoding_fills_it() -> None:
    table = wide(10)
    each = request("x", list(range(55)), 60)
    admit(table, each)
    while len(blocks_of(table, each)) == 4:
        assert named(table) <= {1, 2, 3, 4}
        table.turn()
    assert blocks_of(table, each) == [1, 2, 3, 4, 5]
    assert named(table) == {1, 2, 3, 4}


def test_19_who_does_not_read_the_cache_still_fills_it() -> None:
    table = wide(20)
    table.send(request("first", COMMON, 1))
    table.run()
    anew = request("anew", COMMON, 100)
    anew.read_cache = False
    admit(table, anew)
    assert anew.num_cached_tokens == 0
    assert set(blocks_of(table, anew)).isdisjoint({1, 2, 3})
    assert named(table) >= set(blocks_of(table, anew)[:3])
    other = request("other", [*COMMON, 1], 1)
    table.send(other)
    table.run()
    assert other.num_cached_tokens == 48


def test_24_a_failed_admission_changes_nothing() -> None:
    table = wide(8)
    holder = request("holder", COMMON, 10)
    admit(table, holder)
    idle = request("idle", [*COMMON, *range(48)], 1)
    table.send(idle)
    table.turn()
    before = (free_order(table), list(pool_of(table)._users), named(table))
    assert pool_of(table).num_free == 4
    wanting = request("wanting", [*COMMON, *range(48), *range(400, 432)], 1)
    table.send(wanting)
    plan = table.plan()
    assert plan is not None
    assert not plan.admitted
    # Six hits, of which three are idle, and two blocks more are five of four.
    taken = set(blocks_of(table, holder)) - {1, 2, 3}
    assert [block for block in before[0] if block not in taken] == free_order(table)
    assert named(table) == before[2]
    assert [pool_of(table)._users[block] for block in (1, 2, 3)] == [1, 1, 1]


def test_25_a_flush_takes_names_and_leaves_users() -> None:
    """On purpose unlike the reference, which refuses while a block is in use (ADR 0017)."""
    table = wide(10)
    each = request("x", COMMON, 4)
    admit(table, each)
    assert table.scheduler.flush_cache() == 3
    assert named(table) == set()
    table.run()
    assert each.output_token_ids().tolist() == generate_alone(COMMON, 4, frozenset())


def test_28_an_equal_prompt_of_the_same_step_hits() -> None:
    table = wide(20)
    table.send(request("a", [1] * 100, 1), request("b", [1] * 100, 1))
    plan = table.plan()
    assert plan is not None
    assert [row.num_new_tokens for row in plan.admitted] == [100, 100 % 16]


def test_29_the_next_turn_of_a_conversation_computes_its_tail_alone() -> None:
    table = wide(64)
    turn = request("turn", list(range(200)), 100)
    table.send(turn)
    table.run()
    known = turn.tokens.tolist()
    assert len(known) == 300
    again = request("again", known, 1)
    table.send(again)
    plan = table.plan()
    assert plan is not None
    assert plan.num_tokens == 300 % 16


@pytest.mark.parametrize("num_idle", [0, 1, 10])
def test_40_41_idle_hits_count_as_blocks_they_take(num_idle: int) -> None:
    """Twenty blocks wanted, some of them idle hits: twenty must be free, though fewer are new."""
    prompt = list(range(320))
    for num_others, admitted in ((0, True), (1, False)):
        table = wide(20)
        if num_idle:
            table.send(request("before", prompt[: 16 * num_idle], 1))
            table.run()
        if num_others:
            admit(table, request("other", [9] * 8, 9))
        each = request("x", prompt, 1)
        table.send(each)
        table.plan()
        assert (each.row is not None) == admitted
        if admitted:
            assert each.num_cached_tokens == 16 * num_idle
            assert pool_of(table).num_free == 0
