"""Two workers join as ranks of one group, run rank 0's plans together, and join again together."""

from collections.abc import Iterator
from contextlib import ExitStack
from queue import SimpleQueue

import grpc
import pytest

from fake_model_host import FakeHost, RunningWorker, running_worker
from pagemill.v1 import worker_pb2
from scripted_scheduler import DEADLINE_S, Connection, ScriptedScheduler
from worker_svc.model.shard import Shard
from worker_svc.service.exit_status import ExitStatus


class Pair:
    """Two workers, and the scheduler that they dial."""

    def __init__(self, scheduler: ScriptedScheduler, stack: ExitStack) -> None:
        self.scheduler = scheduler
        self.hosts = (FakeHost(), FakeHost())
        self.workers: list[RunningWorker] = [
            stack.enter_context(running_worker(host, scheduler.address)) for host in self.hosts
        ]

    def place(self) -> tuple[list[Connection], list[worker_pb2.WorkerHello]]:
        """Give both workers a place: rank by wish, else as they come."""
        connections: dict[int, Connection] = {}
        hellos: dict[int, worker_pb2.WorkerHello] = {}
        for _ in self.hosts:
            connection = self.scheduler.accept()
            hello = connection.hear("hello")
            rank = hello.rank if hello.HasField("rank") else len(connections)
            connection.acknowledge_hello(hello, rank=rank, world_size=2, heartbeat_s=0.2)
            connections[rank], hellos[rank] = connection, hello
        ranks = sorted(connections)
        return [connections[rank] for rank in ranks], [hellos[rank] for rank in ranks]

    def meet(self, connections: list[Connection]) -> None:
        """Have both ranks meet and be ready."""
        ports = [connection.hear("loaded").rendezvous_port for connection in connections]
        assert ports[0] > 0
        assert ports[1] == 0
        for connection in connections:
            connection.rendezvous(f"127.0.0.1:{ports[0]}")
        for connection in connections:
            connection.hear("ready")


@pytest.fixture
def pair() -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(stack.enter_context(ScriptedScheduler()), stack)


def test_both_ranks_run_the_plans_of_rank_0_which_alone_answers(pair: Pair) -> None:
    connections, hellos = pair.place()
    assert {hello.host for hello in hellos} == {"127.0.0.1"}
    pair.meet(connections)
    leader, follower = sorted(pair.hosts, key=lambda host: _shard(host).rank)
    ran: SimpleQueue[int] = SimpleQueue()
    follower.on_step = lambda plan: ran.put(plan.step_id)
    for step_id in range(30):
        connections[0].plan(step_id)
        assert connections[0].hear("result").step_id == step_id
        # Real ranks add up in each layer what they have: none is ahead of another by many steps.
        assert ran.get(timeout=DEADLINE_S) == step_id
    connections[0].stop()
    connections[0].hear_end()
    connections[1].stop()
    connections[1].hear_end()
    assert [worker.ends_with() for worker in pair.workers] == [ExitStatus.STOPPED] * 2
    assert [_shard(leader), _shard(follower)] == [Shard(0, 2), Shard(1, 2)]
    assert [plan.step_id for plan in leader.runners[0].plans] == list(range(30))
    # It runs nothing of its own: what it has run, rank 0 passed on.
    assert [plan.step_id for plan in follower.runners[0].plans] == list(range(30))


def test_after_a_loss_both_come_back_with_their_ranks_caches_and_boot_ids(pair: Pair) -> None:
    connections, before = pair.place()
    pair.meet(connections)
    for connection in connections:
        connection.end(grpc.StatusCode.ABORTED)
    connections, after = pair.place()
    assert [hello.boot_id for hello in after] == [hello.boot_id for hello in before]
    assert [hello.rank for hello in after] == [0, 1]
    pair.meet(connections)
    connections[0].plan(0)
    connections[0].hear("result")
    assert [(host.num_loads, len(host.runners)) for host in pair.hosts] == [(1, 1)] * 2
    # Each time, since either may be new.
    assert [host.num_agreements for host in pair.hosts] == [2, 2]


def test_a_drop_that_comes_before_a_plan_waits_for_it(pair: Pair) -> None:
    """Rank 1 gets changes from the scheduler, and plans from rank 0, which may take longer."""
    for host in pair.hosts:
        host.adapters.generations = {"poet": 77, "cook": 78}
    connections, _ = pair.place()
    pair.meet(connections)
    for connection in connections:
        connection.adapter(adapter=1, path="poet", number=1)
        assert connection.hear("adapter").generation == 77
    follower = next(host for host in pair.hosts if _shard(host).rank == 1)
    loaded_then: list[set[int]] = []
    follower.on_step = lambda _plan: loaded_then.append(set(follower.adapters.loaded))
    connections[1].adapter(adapter=1, number=2, num_plans_before=1)
    connections[1].adapter(adapter=1, path="cook", number=3, num_plans_before=1)
    # By then both changes have come.
    connections[1].adapter(adapter=2, path="cook", number=4, num_plans_before=1)
    connections[1].hear_heartbeat(worker_pb2.WORKER_PHASE_IDLE)
    connections[1].hear_heartbeat(worker_pb2.WORKER_PHASE_IDLE)
    assert follower.adapters.generation(1) == 77
    connections[0].plan(0)
    assert connections[0].hear("result").step_id == 0
    assert [connections[1].hear("adapter").number for _ in range(2)] == [3, 4]
    assert loaded_then == [{1}]
    assert [follower.adapters.generation(slot) for slot in (1, 2)] == [78, 78]


def test_another_rank_needs_another_part_and_another_cache(pair: Pair) -> None:
    connections, before = pair.place()
    pair.meet(connections)
    for connection in connections:
        connection.end(grpc.StatusCode.ABORTED)
    old, new = {hello.boot_id for hello in before}, set[int]()
    while len(new) < len(pair.hosts):
        connection = pair.scheduler.accept()
        hello = connection.hear("hello")
        if hello.boot_id in old:
            connection.acknowledge_hello(hello, rank=1 - hello.rank, world_size=2)
        else:
            new.add(hello.boot_id)
            connection.end(grpc.StatusCode.UNAVAILABLE)


def test_a_rank_waits_for_the_others_as_long_as_they_load_and_can_be_stopped_meanwhile(
    pair: Pair,
) -> None:
    connections, _ = pair.place()
    for connection, worker in zip(connections, pair.workers, strict=True):
        connection.hear("loaded")
        connection.hear_heartbeat(worker_pb2.WORKER_PHASE_LOADING)
        connection.hear_heartbeat(worker_pb2.WORKER_PHASE_LOADING)
        assert not worker.status.done()
    connections[0].stop()
    connections[0].hear_end()
    pair.workers[0].shutdown.ask()
    pair.workers[1].shutdown.ask()
    assert [worker.ends_with() for worker in pair.workers] == [ExitStatus.STOPPED] * 2


def _shard(host: FakeHost) -> Shard:
    assert host.ranks is not None
    return host.ranks.shard
