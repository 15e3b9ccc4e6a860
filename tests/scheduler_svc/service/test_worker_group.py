"""Who may join, and what becomes of requests when workers vanish and return, over real gRPC."""

import asyncio
from array import array

import grpc
import pytest

from engine_door_use import ask, until
from fake_worker import FakeWorker, generate_alone
from fake_worker_process import WireWorker, dialled, hello, model_facts, refusal, working
from pagemill.v1 import worker_pb2
from scheduler_svc.core.block_hash import HashAlgorithm, PoolIdentity
from scheduler_svc.core.hash_algorithms import HASH_ALGORITHMS
from scheduler_svc.core.kv_groups import KvGroup
from worker_listener import BLOCK_SIZE, NUM_BLOCKS, PROMPT, WorkerListener, fake_worker, listening


async def test_the_ack_gives_place_device_and_bounds() -> None:
    async with (
        listening(heartbeat_s=2.5) as listener,
        dialled(listener.address, hello(boot_id=255)) as connection,
    ):
        ack = connection.ack
        await connection.ready(NUM_BLOCKS)
        await until(listener.ready)
        state = listener.group.state()
    assert (ack.group, ack.rank, ack.world_size) == (0, 0, 1)
    assert (ack.device_uuid, ack.block_size, ack.max_num_seqs) == ("ff", BLOCK_SIZE, 4)
    assert (ack.max_num_batched_tokens, ack.max_model_len, ack.pipeline_depth) == (16, 128, 2)
    assert (ack.heartbeat_s, ack.num_blocks_override, ack.max_adapters) == (2.5, 0, 2)
    assert (state.number, state.ready, state.epoch, state.num_blocks) == (0, True, 1, NUM_BLOCKS)
    assert state.fingerprint == "f00d"
    worker = state.workers[0]
    assert (worker.boot_id, worker.device, worker.dtype) == (255, "cpu", "float32")
    assert worker.phase == "idle"


@pytest.mark.parametrize(
    ("greeting", "complaint"),
    [
        (hello(protocol_version=9), "protocol_version is 9, must be 1"),
        (hello(group=4), "group is 4, must be 0"),
        (hello(rank=1), "rank is 1, must be 0"),
        (hello(model=model_facts(vocab_size=5)), "vocab_size is 5, must be 3"),
        (
            hello(model=worker_pb2.ModelFacts(max_position_embeddings=127)),
            "max_position_embeddings is 127, must be at least max_model_len, 128",
        ),
        (worker_pb2.WorkerHello(protocol_version=1), "devices is 0, must be at least 1"),
    ],
)
async def test_a_hello_that_does_not_fit_is_refused_with_field_and_both_values(
    greeting: worker_pb2.WorkerHello, complaint: str
) -> None:
    async with listening() as listener:
        code, details = await refusal(listener.address, greeting)
        assert (code, details) == (grpc.StatusCode.FAILED_PRECONDITION, complaint)
        async with working(listener.address, fake_worker()):
            await until(listener.ready)


@pytest.mark.parametrize("algorithm", HASH_ALGORITHMS.values(), ids=lambda a: a.name)
async def test_blocks_are_named_under_the_configured_seed_and_the_workers_model(
    algorithm: HashAlgorithm,
) -> None:
    model = worker_pb2.ModelFacts(
        fingerprint="f00d",
        kv_dtype="fp8",
        kv_groups=[worker_pb2.KvGroup(num_layers=2, num_kv_heads=3, head_dim=64)],
        vocab_size=3,
        max_position_embeddings=128,
    )
    greeting = hello()
    greeting.model.CopyFrom(model)
    pool = PoolIdentity("f00d", "fp8", BLOCK_SIZE, "2x3x64w0")
    tokens = memoryview(array("i", PROMPT))
    (name,) = algorithm.hash_full_blocks(tokens, BLOCK_SIZE, algorithm.root("0", pool))
    (other,) = algorithm.hash_full_blocks(tokens, BLOCK_SIZE, algorithm.root("", pool))
    async with (
        listening(hash_algorithm=algorithm, hash_seed="0") as listener,
        working(listener.address, fake_worker(), greeting),
    ):
        await until(listener.ready)
        await ask(listener.engine, "r", PROMPT, 1)
        named = listener.scheduler.pool
        assert named is not None
        assert named.lookup(name) is not None
        assert named.lookup(other) is None


async def test_each_kv_group_of_the_workers_model_has_its_own_block_tables() -> None:
    greeting = hello()
    del greeting.model.kv_groups[:]
    for window in (0, 6):
        greeting.model.kv_groups.add(
            num_layers=1, num_kv_heads=2, head_dim=8, sliding_window=window
        )
    worker = WireWorker(BLOCK_SIZE, NUM_BLOCKS, (KvGroup(), KvGroup(window=6)))
    async with listening() as listener, working(listener.address, worker, greeting) as connection:
        await until(listener.ready)
        assert await ask(listener.engine, "r", PROMPT, 20) == generate_alone(
            PROMPT, 20, frozenset()
        )
    tables = [row.block_tables for plan in connection.plans for row in plan.admitted]
    assert [len(table) for table in tables] == [2]
    gained = {part.group for plan in connection.plans for part in plan.appended}
    assert gained == {0, 1}


@pytest.mark.parametrize("number", [0, 65])
async def test_a_worker_without_kv_groups_or_with_too_many_is_refused(number: int) -> None:
    greeting = hello()
    del greeting.model.kv_groups[:]
    for _ in range(number):
        greeting.model.kv_groups.add(num_layers=1)
    async with listening() as listener:
        code, details = await refusal(listener.address, greeting)
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert details == f"the number of kv_groups is {number}, must be 1 to 64"


async def test_a_worker_with_another_model_than_the_first_is_refused() -> None:
    async with listening() as listener:
        async with working(listener.address, fake_worker()):
            await until(listener.ready)
        await until(listener.lost)
        for field, model in (
            ("fingerprint", model_facts(fingerprint="beef")),
            ("kv_dtype", worker_pb2.ModelFacts(kv_dtype="bfloat16")),
            ("kv_groups", worker_pb2.ModelFacts(kv_groups=[worker_pb2.KvGroup(num_layers=1)])),
        ):
            greeting = hello(boot_id=2, model=model)
            code, details = await refusal(listener.address, greeting)
            assert code is grpc.StatusCode.FAILED_PRECONDITION
            assert details.startswith(f"{field} is ")


async def test_a_wrong_join_secret_is_refused() -> None:
    async with listening(join_secret="s3cret") as listener:
        for secret in ("", "wrong"):
            code, details = await refusal(listener.address, hello(join_secret=secret))
            assert (code, details) == (
                grpc.StatusCode.UNAUTHENTICATED,
                "join_secret does not match",
            )
        async with dialled(listener.address, hello(join_secret="s3cret")):
            pass


async def test_the_only_place_is_given_once() -> None:
    async with listening() as listener, working(listener.address, fake_worker()):
        await until(listener.ready)
        code, details = await refusal(listener.address, hello(boot_id=2))
        assert code is grpc.StatusCode.ALREADY_EXISTS
        assert "taken by the worker with boot id 0000000000000001" in details
        assert listener.ready()


async def test_a_worker_that_comes_back_replaces_its_own_old_stream() -> None:
    worker = fake_worker()
    async with listening() as listener, working(listener.address, worker) as old:
        await until(listener.ready)
        async with working(listener.address, worker):
            assert (await old.status())[0] is grpc.StatusCode.ABORTED
            await until(listener.ready)
            assert await ask(listener.engine, "r", PROMPT, 5) == generate_alone(
                PROMPT, 5, frozenset()
            )


async def lose_in_the_middle(
    listener: WorkerListener, worker: FakeWorker
) -> "asyncio.Task[list[int]]":
    """Start a request of 20 tokens, and drop the connection with plans in flight."""
    async with working(listener.address, worker, hello(boot_id=1)) as connection:
        await until(listener.ready)
        asking = asyncio.create_task(ask(listener.engine, "r", PROMPT, 20))
        await until(lambda: len(connection.plans) >= 6)
        connection.gate.clear()
        await until(lambda: listener.scheduler.num_in_flight == 2)
    await until(listener.lost)
    return asking


async def test_after_a_lost_connection_no_token_is_lost_or_repeated_and_the_cache_is_kept() -> None:
    worker = fake_worker()
    async with listening() as listener:
        asking = await lose_in_the_middle(listener, worker)
        async with working(listener.address, worker, hello(boot_id=1)) as connection:
            assert await asking == generate_alone(PROMPT, 20, frozenset())
            first = connection.plans[0]
    assert first.reset
    assert (first.step_id, first.epoch.number, first.epoch.incarnation) == (0, 2, 2**63 + 1)
    assert first.admitted[0].num_computed_tokens > 0


async def test_a_restarted_worker_begins_with_an_empty_cache() -> None:
    async with listening() as listener:
        asking = await lose_in_the_middle(listener, fake_worker())
        async with working(listener.address, fake_worker(), hello(boot_id=2)) as connection:
            assert await asking == generate_alone(PROMPT, 20, frozenset())
            assert connection.plans[0].admitted[0].num_computed_tokens == 0


async def test_the_first_worker_returning_after_the_second_has_no_cache_either() -> None:
    first = fake_worker()
    async with listening() as listener:
        asking = await lose_in_the_middle(listener, first)
        async with working(listener.address, fake_worker(), hello(boot_id=2)) as second:
            second.gate.clear()
            await until(lambda: bool(second.plans))
        await until(listener.lost)
        async with working(listener.address, first, hello(boot_id=1)) as connection:
            assert await asking == generate_alone(PROMPT, 20, frozenset())
            assert connection.plans[0].admitted[0].num_computed_tokens == 0


@pytest.mark.parametrize("num_blocks", [0, 2**24 + 1, 2**32 - 1])
async def test_a_pool_has_a_size_that_can_be(num_blocks: int) -> None:
    async with listening() as listener, dialled(listener.address) as connection:
        await connection.ready(num_blocks)
        code, details = await connection.status()
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert details == f"num_blocks is {num_blocks}, must be 1 to 16777216"


async def test_stopping_asks_workers_to_leave_and_lets_no_new_one_in() -> None:
    async with listening() as listener, working(listener.address, fake_worker()) as connection:
        await until(listener.ready)
        async with asyncio.timeout(10):
            await listener.group.stop()
        assert connection.stopped
        assert (await connection.status())[0] is grpc.StatusCode.OK
        code, _ = await refusal(listener.address, hello(boot_id=3))
        assert code is grpc.StatusCode.UNAVAILABLE
