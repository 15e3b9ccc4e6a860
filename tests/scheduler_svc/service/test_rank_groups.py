"""A group of several ranks: how it forms, falls apart and forms again, over real gRPC."""

import asyncio
from functools import partial

import grpc
import pytest
from structlog.testing import capture_logs

from engine_door_use import ask, until
from fake_ranks import PORT, alive, meet, working_ranks
from fake_worker import generate_alone
from fake_worker_process import Connection, dialled, hello, model_facts, refusal
from pagemill.v1 import worker_pb2
from scheduler_svc.core.errors import AdapterLoadError
from worker_listener import NUM_BLOCKS, PROMPT, WorkerListener, fake_worker, listening


def tokens(count: int) -> list[int]:
    return generate_alone(PROMPT, count, frozenset())


async def ended(connection: Connection) -> str:
    """Return the reason for which a rank is told to join again."""
    code, reason = await connection.status()
    assert code is grpc.StatusCode.ABORTED
    return reason


async def test_all_ranks_meet_where_rank_0_waits_once_the_last_has_loaded() -> None:
    async with listening(tensor_parallel_size=3) as listener:
        greetings = [hello(boot_id=boot_id, host="10.0.0.9") for boot_id in (7, 8, 9)]
        async with (
            dialled(listener.address, greetings[0]) as first,
            dialled(listener.address, greetings[1]) as second,
        ):
            early = [asyncio.create_task(first.meet(PORT)), asyncio.create_task(second.meet())]
            async with dialled(listener.address, greetings[2]) as third:
                acks = [each.ack for each in (first, second, third)]
                assert [(ack.rank, ack.world_size) for ack in acks] == [(0, 3), (1, 3), (2, 3)]
                assert {ack.device_uuid for ack in acks} == {"7", "8", "9"}
                assert not any(task.done() for task in early)
                address = await third.meet()
                assert [address, *await asyncio.gather(*early)] == [f"10.0.0.9:{PORT}"] * 3


async def test_the_group_has_as_many_blocks_as_the_smallest_rank_and_only_rank_0_gets_plans() -> (
    None
):
    async with (
        listening(tensor_parallel_size=2) as listener,
        working_ranks(listener.address, fake_worker(), (1, 2), (NUM_BLOCKS, 40)) as ranks,
    ):
        await until(listener.ready)
        assert await ask(listener.engine, "r", PROMPT, 20) == tokens(20)
        state = listener.group.state()
    assert (state.epoch, state.num_blocks) == (1, 40)
    assert [worker.boot_id for worker in state.workers] == [1, 2]
    assert len(ranks[0].plans) >= 20
    assert ranks[1].plans == []


async def test_the_group_is_not_ready_before_its_last_rank() -> None:
    async with (
        listening(tensor_parallel_size=2) as listener,
        dialled(listener.address, hello(boot_id=1)) as first,
        dialled(listener.address, hello(boot_id=2)) as second,
    ):
        assert await meet((first, second)) == {f"127.0.0.1:{PORT}"}
        await first.ready(NUM_BLOCKS)
        async with alive(first), alive(second):
            # The heartbeat behind it has arrived, so the message in front of it has.
            await until(lambda: listener.group.state().workers[0].phase == "idle")
            assert not listener.ready()
            await second.ready(NUM_BLOCKS)
            await until(listener.ready)


async def lose_a_rank(listener: WorkerListener, lost: int) -> "asyncio.Task[list[int]]":
    """Begin a request of 20 tokens on boot ids 1 and 2, and lose a rank in the middle."""
    async with working_ranks(listener.address, fake_worker(), (1, 2)) as ranks:
        await until(listener.ready)
        asking = asyncio.create_task(ask(listener.engine, "r", PROMPT, 20))
        await until(lambda: len(ranks[0].plans) >= 6)
        ranks[0].gate.clear()
        await until(lambda: listener.scheduler.num_in_flight == 2)
        ranks[lost].drop()
        await until(listener.lost)
        reason = await ended(ranks[1 - lost])
    assert f"rank {lost} was lost" in reason
    assert reason.endswith("join again")
    return asking


@pytest.mark.parametrize("lost", [0, 1])
async def test_with_any_rank_the_group_is_lost_and_its_requests_go_on_in_the_next(
    lost: int,
) -> None:
    async with listening(tensor_parallel_size=2) as listener:
        asking = await lose_a_rank(listener, lost)
        boot_ids = [1, 2]
        boot_ids[lost] = 3
        async with working_ranks(listener.address, fake_worker(), boot_ids) as ranks:
            assert await asking == tokens(20)
            (first, *_) = ranks[0].plans
            state = listener.group.state()
    assert first.reset
    assert (first.step_id, first.epoch.number) == (0, 2)
    assert first.admitted[0].num_computed_tokens == 0
    assert [worker.boot_id for worker in state.workers] == boot_ids


async def test_when_the_same_processes_return_the_cache_is_kept() -> None:
    worker = fake_worker()
    async with listening(tensor_parallel_size=2) as listener:
        async with working_ranks(listener.address, worker, (1, 2)) as ranks:
            await until(listener.ready)
            assert await ask(listener.engine, "r", PROMPT, 5) == tokens(5)
            ranks[1].drop()
            await until(listener.lost)
        # In whatever order: each finds its own rank again.
        async with working_ranks(listener.address, worker, (2, 1)) as ranks:
            await until(listener.ready)
            assert await ask(listener.engine, "s", PROMPT, 5) == tokens(5)
            assert ranks[0].plans[0].admitted[0].num_computed_tokens > 0
            assert [each.boot_id for each in listener.group.state().workers] == [1, 2]


async def test_a_silent_rank_is_seen_within_three_heartbeats() -> None:
    # Read from the log: of a rank whose heartbeat meets the end, gRPC reports an error of its own.
    with capture_logs() as lines:
        async with (
            listening(tensor_parallel_size=2, heartbeat_s=0.2) as listener,
            working_ranks(listener.address, fake_worker(), (1, 2)) as ranks,
        ):
            await until(listener.ready)
            before = ranks[0].num_heartbeats
            ranks[1].fall_silent()
            await until(lambda: sum(line["event"] == "worker gone" for line in lines) == 2)
            # Twice the bound, for a busy machine.
            assert ranks[0].num_heartbeats - before < 6
    gone = {line["rank"]: line["reason"] for line in lines if line["event"] == "worker gone"}
    assert gone[1].startswith("no heartbeat for ")
    assert gone[0].startswith("rank 1 was lost: no heartbeat for ")


async def test_a_stand_by_waits_outside_and_takes_the_lost_ones_place() -> None:
    async with listening(tensor_parallel_size=2) as listener:
        async with working_ranks(listener.address, fake_worker(), (1, 2)) as ranks:
            await until(listener.ready)
            code, details = await refusal(listener.address, hello(boot_id=3))
            assert code is grpc.StatusCode.ALREADY_EXISTS
            assert "rank 0 is taken by the worker with boot id 0000000000000001" in details
            assert "rank 1 is taken" in details
            ranks[0].drop()
            await ended(ranks[1])
        async with dialled(listener.address, hello(boot_id=3)) as stand_by:
            assert stand_by.ack.rank == 0
            code, details = await refusal(listener.address, hello(boot_id=4))
            assert code is grpc.StatusCode.ALREADY_EXISTS
            assert "kept for workers that should come back" in details


async def test_a_rank_lost_while_others_load_costs_only_its_place() -> None:
    async with (
        listening(tensor_parallel_size=2) as listener,
        dialled(listener.address, hello(boot_id=1)) as first,
    ):
        async with dialled(listener.address, hello(boot_id=2)):
            pass
        await until(lambda: len(listener.group.state().workers) == 1)
        async with dialled(listener.address, hello(boot_id=3)) as second:
            assert second.ack.rank == 1
            await meet((first, second))


async def test_ranks_of_a_group_must_load_the_same_model() -> None:
    async with (
        listening(tensor_parallel_size=2) as listener,
        dialled(listener.address, hello(boot_id=1)),
    ):
        other = hello(boot_id=2, model=model_facts(fingerprint="beef"))
        code, details = await refusal(listener.address, other)
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert details == "fingerprint is beef, must be f00d"


async def test_ranks_of_one_machine_get_a_device_each() -> None:
    gpus = [worker_pb2.Device(kind="cuda", uuid=f"GPU-{number}") for number in range(2)]

    def greeting(boot_id: int) -> worker_pb2.WorkerHello:
        message = hello(boot_id=boot_id)
        del message.devices[:]
        message.devices.extend(gpus)
        return message

    async with (
        listening(tensor_parallel_size=3) as listener,
        dialled(listener.address, greeting(1)) as first,
        dialled(listener.address, greeting(2)) as second,
    ):
        assert [first.ack.device_uuid, second.ack.device_uuid] == ["GPU-0", "GPU-1"]
        code, details = await refusal(listener.address, greeting(3))
        assert code is grpc.StatusCode.ALREADY_EXISTS
        assert details == "every device of the worker is taken by another rank"
        # One that comes back has its own.
        async with dialled(listener.address, greeting(2)) as again:
            assert again.ack.device_uuid == "GPU-1"


async def test_what_comes_in_the_wrong_order_ends_the_stream() -> None:
    async with listening(tensor_parallel_size=2) as listener:
        async with dialled(listener.address) as connection:
            await connection.ready(NUM_BLOCKS)
            assert await ended(connection) == "ready came before the ranks had met"
        async with dialled(listener.address) as connection:
            await connection.say_loaded(0)
            assert await ended(connection) == "rendezvous_port is 0, must be 1 to 65535"
        async with dialled(listener.address) as connection:
            await connection.say_loaded(PORT)
            await connection.say_loaded(PORT)
            assert await ended(connection) == "loaded was not expected"
        code, details = await refusal(listener.address, hello(rank=2))
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert details == "rank is 2, must be 0 to 1"


async def test_the_leader_is_asked_to_leave_before_the_others() -> None:
    async with (
        listening(tensor_parallel_size=2) as listener,
        working_ranks(listener.address, fake_worker(), (1, 2)) as ranks,
    ):
        await until(listener.ready)
        left: list[int] = []
        for connection in ranks:
            connection.on_stop = partial(left.append, connection.ack.rank)
        async with asyncio.timeout(10):
            await listener.group.stop()
    assert left == [0, 1]


async def test_a_change_of_an_adapter_says_behind_which_plan_it_stands_to_every_rank() -> None:
    """Plans reach the others by way of rank 0, changes do not."""
    async with (
        listening(tensor_parallel_size=2) as listener,
        working_ranks(listener.address, fake_worker(), (1, 2)) as ranks,
    ):
        await until(listener.ready)
        assert await ask(listener.engine, "r", PROMPT, 20) == tokens(20)
        loading = asyncio.create_task(listener.adapters.load("poet", "poets/one"))
        await until(lambda: all(rank.changes for rank in ranks))
        ((num_plans, change),) = ranks[0].changes
        assert num_plans >= 20
        assert ranks[1].changes == [(0, change)]
        assert change.num_plans_before == num_plans
        for rank in ranks:
            answer = worker_pb2.AdapterAnswer(number=change.number, generation=5)
            await rank.send(adapter=answer)
        assert await loading == 5


async def test_an_adapter_that_one_rank_cannot_load_is_dropped_by_all() -> None:
    async with (
        listening(tensor_parallel_size=2) as listener,
        working_ranks(listener.address, fake_worker(), (1, 2)) as ranks,
    ):
        await until(listener.ready)
        loading = asyncio.create_task(listener.adapters.load("poet", "poets/one"))
        await until(lambda: all(rank.changes for rank in ranks))
        number = ranks[0].changes[0][1].number
        await ranks[0].send(adapter=worker_pb2.AdapterAnswer(number=number, generation=5))
        await ranks[1].send(adapter=worker_pb2.AdapterAnswer(number=number, error="no such file"))
        with pytest.raises(AdapterLoadError, match="no such file"):
            await loading
        await until(lambda: all(len(rank.changes) == 2 for rank in ranks))
        assert [(rank.changes[1][1].adapter, rank.changes[1][1].path) for rank in ranks] == [
            (1, "")
        ] * 2
        assert listener.adapters.loaded() == ()
        assert await ask(listener.engine, "r", PROMPT, 20) == tokens(20)
