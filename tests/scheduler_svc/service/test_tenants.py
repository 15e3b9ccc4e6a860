"""Tenants over real gRPC: shares of tokens by weight, ids and prefixes of their own."""

import asyncio
from pathlib import Path

import grpc
import pytest
from grpc import aio

from fake_worker import generate_alone
from fake_worker_process import Connection, WireWorker, working
from pagemill.v1 import control_pb2, control_pb2_grpc
from scheduler_process import Answer, generate, model_hello, scheduler, until_serving, write_model

PROMPT = [1, 2, 0, 1, 1, 2, 0]
ROWS = 4
FAIR = ("--scheduling-policy", "fair", "--max-num-seqs", str(ROWS))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


async def ask_many(
    channel: aio.Channel, tenant: str, count: int, length: int
) -> list["asyncio.Task[Answer]"]:
    """Send requests of one tenant, and wait until the server has them all."""
    before = await num_live(channel)
    asked = [
        asyncio.create_task(
            generate(channel, [i % 3, 1], length, tenant=tenant, request_id=f"{tenant}/{i}")
        )
        for i in range(count)
    ]
    async with asyncio.timeout(20):
        while await num_live(channel) < before + count:
            await asyncio.sleep(0.005)
    return asked


async def num_live(channel: aio.Channel) -> int:
    load = await control_pb2_grpc.ControlStub(channel).GetLoad(control_pb2.GetLoadRequest())
    return int(load.running + load.waiting)


def admissions(worker: Connection) -> list[str]:
    """Return the tenants whose requests were given rows, in order."""
    return [row.request_id.partition("/")[0] for plan in worker.plans for row in plan.admitted]


async def test_tenants_share_tokens_by_their_weights(model: Path) -> None:
    async with (
        scheduler(model, *FAIR, "--tenant-weights", "light=1,heavy=3") as running,
        aio.insecure_channel(running.address) as channel,
        working(running.workers, WireWorker(4, 400), model_hello()) as worker,
    ):
        await until_serving(channel)
        worker.gate.clear()
        # The light tenant comes first, and would have every row under first come, first served.
        asked = await ask_many(channel, "light", 40, 8)
        asked += await ask_many(channel, "heavy", 40, 8)
        worker.gate.set()
        answers = await asyncio.gather(*asked)
    assert all(answer.code is grpc.StatusCode.OK for answer in answers)
    alone = [generate_alone([i % 3, 1], 8, frozenset()) for i in range(40)]
    assert [answer.tokens for answer in answers] == alone * 2
    # Equal requests, so rows are tokens. While both wait, three of four are the heavy one's.
    contested = admissions(worker)[ROWS : ROWS + 40]
    assert 27 <= contested.count("heavy") <= 33


@pytest.mark.parametrize(
    ("policy", "least", "most"), [("fair", 0, ROWS), ("fcfs", 60, 60)], ids=["fair", "fcfs"]
)
async def test_a_flood_starves_another_tenant_unless_shares_are_fair(
    model: Path, policy: str, least: int, most: int
) -> None:
    async with (
        scheduler(model, "--scheduling-policy", policy, "--max-num-seqs", "4") as running,
        aio.insecure_channel(running.address) as channel,
        working(running.workers, WireWorker(4, 400), model_hello()) as worker,
    ):
        await until_serving(channel)
        worker.gate.clear()
        flood = await ask_many(channel, "flood", 60, 6)
        small = await ask_many(channel, "small", 1, 6)
        worker.gate.set()
        await asyncio.gather(*flood, *small)
    assert least <= admissions(worker).index("small") <= most


async def test_two_tenants_use_one_request_id_at_once(model: Path) -> None:
    async with (
        scheduler(model) as running,
        aio.insecure_channel(running.address) as channel,
        working(running.workers, WireWorker(4, 400), model_hello()) as worker,
    ):
        await until_serving(channel)
        worker.gate.clear()
        asked = [
            asyncio.create_task(generate(channel, PROMPT, 20, tenant=tenant, request_id="same"))
            for tenant in ("a", "b", "")
        ]
        async with asyncio.timeout(20):
            while await num_live(channel) < 3:
                await asyncio.sleep(0.005)
        again = await generate(channel, PROMPT, 20, tenant="b", request_id="same")
        assert again.code is grpc.StatusCode.ALREADY_EXISTS
        control = control_pb2_grpc.ControlStub(channel)
        ended = await control.Abort(control_pb2.AbortRequest(tenant="a", request_ids=["same"]))
        assert list(ended.aborted) == ["same"]
        assert (await asked[0]).tokens == []
        worker.gate.set()
        alone = Answer(generate_alone(PROMPT, 20, frozenset()))
        assert [await asked[1], await asked[2]] == [alone, alone]


async def test_a_tenant_hits_its_own_prefixes_only(model: Path) -> None:
    async with (
        scheduler(model) as running,
        aio.insecure_channel(running.address) as channel,
        working(running.workers, WireWorker(4, 400), model_hello()),
    ):
        await until_serving(channel)
        tenants = ("", "a", "b", "a", "")
        answers = [await generate(channel, PROMPT, 4, tenant=tenant) for tenant in tenants]
    assert [answer.cached_tokens for answer in answers] == [0, 0, 0, 4, 4]
    assert {tuple(answer.tokens) for answer in answers} == {
        tuple(generate_alone(PROMPT, 4, frozenset()))
    }
