"""A queue gives turns by its policy, whatever was queued and taken before.

Scenarios are those of the reference's list (docs/adr/0015-policies.md).
"""

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_bench import request
from scheduler_svc.core.request import Request
from scheduler_svc.core.tenant_shares import MAX_IDLE_ACCOUNTS, TenantShares
from scheduler_svc.core.waiting_queue import FairQueue, PriorityQueue, WaitingQueue, waiting_queue


def waiter(
    sequence: int, priority: int = 0, arrival_ns: int = 0, tenant: str = "", weight: float = 1
) -> Request:
    made = request(
        str(sequence),
        [0] * 4,
        priority=priority,
        arrival_ns=arrival_ns,
        tenant=tenant,
        weight=weight,
    )
    made.sequence = sequence
    return made


def turns(queue: WaitingQueue) -> list[str]:
    """Take everybody out, in turn."""
    taken = []
    for each in queue.in_turn():
        queue.remove(each)
        taken.append(each.request_id)
    assert not len(queue)
    assert queue.num_tokens == 0
    return taken


@pytest.mark.parametrize(
    ("priorities", "arrivals", "order"),
    [
        ([2, 0, 1], [0, 1, 2], "120"),
        ([0, 0, 0], [3, 1, 2], "120"),
        ([2, 1, 1, 0], [1, 3, 2, 4], "3210"),
        ([1, 1, 1, 1], [4, 1, 3, 2], "1320"),
    ],
)
def test_71_priority_then_arrival(priorities: list[int], arrivals: list[int], order: str) -> None:
    queue = PriorityQueue()
    requests = [waiter(sequence=arrivals[i], priority=p) for i, p in enumerate(priorities)]
    for each in requests:
        queue.add(each)
    named = {each.request_id: str(i) for i, each in enumerate(requests)}
    assert "".join(named[name] for name in turns(queue)) == order


@given(
    policy=st.sampled_from(["fcfs", "priority", "fair"]),
    priorities=st.lists(st.integers(-3, 3), max_size=30),
    taken=st.sets(st.integers(0, 29)),
)
def test_75_order_holds_for_any_inserts_and_removals(
    policy: str, priorities: list[int], taken: set[int]
) -> None:
    queue = waiting_queue(policy)
    requests = [waiter(i, priority, tenant=str(i % 3)) for i, priority in enumerate(priorities)]
    for each in reversed(requests):
        queue.add(each)
    for i in taken & set(range(len(requests))):
        queue.remove(requests[i])
    left = [each for i, each in enumerate(requests) if i not in taken]
    assert {each.request_id for each in queue} == {each.request_id for each in left}
    assert len(queue) == len(left)
    assert queue.num_tokens == sum(each.num_tokens for each in left)
    key = {"priority": lambda r: (r.priority, r.sequence)}.get(policy, lambda r: (0, r.sequence))
    if policy != "fair":
        left.sort(key=key)
        assert turns(queue) == [each.request_id for each in left]
    else:
        assert sorted(turns(queue)) == sorted(each.request_id for each in left)


def test_a_look_at_the_turns_takes_nobody() -> None:
    for policy in ("fcfs", "priority", "fair"):
        queue = waiting_queue(policy)
        for i in range(4):
            queue.add(waiter(i, tenant=str(i % 2)))
        seen = [each.request_id for each in queue.in_turn()]
        assert sorted(seen) == ["0", "1", "2", "3"]
        assert [each.request_id for each in queue.in_turn()] == seen


def test_ageing_is_worth_a_step_of_priority() -> None:
    queue = PriorityQueue(ageing_ns=100)
    queue.add(waiter(0, priority=1, arrival_ns=0))
    queue.add(waiter(1, priority=0, arrival_ns=99))
    queue.add(waiter(2, priority=0, arrival_ns=101))
    assert turns(queue) == ["1", "0", "2"]


def test_only_worse_priority_yields_and_not_once_it_has_aged_past() -> None:
    queue = PriorityQueue(ageing_ns=100)
    old, equal, new = waiter(0, 1, 0), waiter(1, 0, 300), waiter(2, 1, 300)
    better = waiter(3, 0, 301)
    for each in (old, equal, new, better):
        queue.add(each)
    assert queue.yielding_to(better, [old, equal, new]) == [new]
    assert queue.yielding_to(new, [old, equal, better]) == []
    assert WaitingQueue().yielding_to(better, [old, equal, new]) == []


def served_by(queue: FairQueue, count: int, num_tokens: int = 10) -> dict[str, int]:
    """Admit some, each running `num_tokens` at once, and count them by tenant."""
    counts: dict[str, int] = {}
    for each in islice(queue.in_turn(), count):
        queue.remove(each)
        queue.charge(each, num_tokens)
        counts[each.tenant] = counts.get(each.tenant, 0) + 1
    return counts


def test_tenants_share_by_weight_whoever_asks_more() -> None:
    queue = FairQueue()
    for i in range(200):
        queue.add(waiter(i, tenant="many", weight=1))
    for i in range(200, 260):
        queue.add(waiter(i, tenant="few", weight=2))
    assert served_by(queue, 60) == {"many": 20, "few": 40}


def test_a_tenant_gains_nothing_by_having_waited_for_nothing() -> None:
    queue = FairQueue()
    for i in range(100):
        queue.add(waiter(i, tenant="early"))
    served_by(queue, 50)
    for i in range(100, 200):
        queue.add(waiter(i, tenant="late"))
    assert served_by(queue, 20) == {"early": 10, "late": 10}


def test_a_tenant_does_not_shed_what_it_was_served_by_leaving() -> None:
    queue = FairQueue()
    first = waiter(0, tenant="greedy")
    other = [waiter(i, tenant="other") for i in range(1, 20)]
    for each in (first, *other):
        queue.add(each)
    queue.remove(first)
    queue.charge(first, 100)
    queue.forget(first)
    for i in range(20, 40):
        queue.add(waiter(i, tenant="greedy"))
    assert served_by(queue, 10) == {"other": 10}


def test_accounts_of_idle_tenants_are_bounded() -> None:
    shares = TenantShares()
    for i in range(3 * MAX_IDLE_ACCOUNTS):
        shares.close(shares.open(str(i), 1.0))
    assert len(shares.served) <= 4 * MAX_IDLE_ACCOUNTS
    assert shares.open("new", 1.0) < len(shares.served)
