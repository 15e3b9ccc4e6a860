"""The dump names what runs, what waits and what it lacks, and changes nothing."""

import pytest

from scheduler_bench import bench, request
from scheduler_svc.core.errors import InvariantError


def test_the_dump_says_who_runs_who_waits_and_for_what() -> None:
    table = bench(8, rows=2, depth=2)
    first = request("first", [0] * 12, 8, tenant="a b")
    first.deadline_ns = 5_000_000_000
    table.send(first, request("large", [1] * 24), request("small", [1, 1]))
    table.plan()
    before = [list(table.scheduler._state.rows.running), table.scheduler.num_waiting]
    assert table.scheduler.dump(2_000_000_000).splitlines() == [
        "limits: 2 rows, 64 tokens a step, 64 of one row, 64 of one request, any number of long "
        "prefills, 2 steps in flight",
        "pool: 8 blocks of 4, 4 used, 0 idle with content, 4 empty",
        "group: takes plans",
        "in flight: 1 steps, the next is 1",
        "  step 0: 2 rows run, 2 sample, 0 have lost their row, 3 names rest on it",
        "running: 2",
        "  'first' of 'a b' (here for 2.000 s, deadline in 3.000 s): row 0, 12 tokens known, "
        "1 pending, 12 computed, ends at 20, 3 blocks",
        "  'small' (here for 2.000 s): row 1, 2 tokens known, 1 pending, 2 computed, ends at 6, "
        "1 blocks",
        "waiting: 1, 24 tokens",
        "  'large' (here for 2.000 s): 24 tokens known, lacks a row, 2 are taken and 2 of 6 blocks",
    ]
    assert before == [list(table.scheduler._state.rows.running), table.scheduler.num_waiting]
    table.scheduler.check()
    table.run()


def test_the_dump_counts_those_it_does_not_name() -> None:
    table = bench(64, rows=1, waiting=500)
    table.send(*(request(str(number), [number]) for number in range(300)))
    lines = table.scheduler.dump(0).splitlines()
    assert "waiting: 300, 300 tokens" in lines
    assert len(lines) < 80
    assert lines[-1].endswith("lacks nothing but its turn")


def test_without_a_worker_the_dump_says_so() -> None:
    table = bench(8)
    table.send(request("r", [0] * 5))
    table.plan()
    table.scheduler.lose_worker(7)
    lines = table.scheduler.dump(7).splitlines()
    assert "group: takes no plans" in lines
    assert "preempted 1 times" in lines[-1]


def test_work_without_progress_is_an_error_that_a_dump_explains() -> None:
    table = bench(8)
    table.send(request("stuck", [0] * 5))
    assert table.scheduler.pool is not None
    # Blocks that nobody holds and nobody gets back.
    table.scheduler.pool.allocate(7)
    with pytest.raises(InvariantError, match="no progress: 0 running, 1 waiting, 1 of 8 blocks"):
        table.scheduler.schedule(0)
    assert "'stuck'" in table.scheduler.dump(0)
    assert table.scheduler.dump(0).endswith("5 tokens known, lacks 1 of 2 blocks")
