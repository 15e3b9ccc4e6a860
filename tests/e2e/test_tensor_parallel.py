"""Ranks that share a model give its tokens; a lost one is a pause."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from e2e.conftest import PROMPTS
from e2e.serving import Served, serving
from pagemill.client import AsyncClient, Completion, Delta, PagemillError
from tiny_adapter import write_adapter
from tiny_llama import write_tiny_llama

LIMIT_S = 60.0
COUNT = 16
HEARTBEAT_BOUND_S = 3.0
TINY_PROMPT = list(range(40, 60))


def ranks(count: int) -> tuple[str, ...]:
    return ("--tensor-parallel-size", str(count), "--threads", "1")


async def answers(*flags: str) -> list[Completion]:
    """Ask all prompts at once, in a pool so small that some are preempted; then two sequences."""
    with serving("demo", "--num-gpu-blocks-override", "10", *flags) as served:
        async with AsyncClient(served.address) as client:
            found = await asyncio.gather(
                *(
                    client.complete(
                        prompt=prompt, max_tokens=COUNT, temperature=0.0, ignore_eos=True
                    )
                    for prompt in PROMPTS[-5:]
                )
            )
            assert (await client.load()).totals.preemptions > 0
            # Its prefix is in the cache; both sequences go on from it, drawn at random.
            forked = await client.complete(
                prompt=PROMPTS[-1], max_tokens=COUNT, temperature=0.9, seed=11, n=2, ignore_eos=True
            )
            assert forked.usage.cached_tokens >= 32
    return [*found, forked]


def tokens(completions: list[Completion]) -> list[list[int]]:
    return [list(each.token_ids) for whole in completions for each in whole.sequences]


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    return tokens(asyncio.run(answers()))


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
async def test_the_demo_models_tokens_are_those_of_one_worker(
    world_size: int, alone: list[list[int]]
) -> None:
    """Two ranks have 2 and 1 of its 3 key/value heads; three have one each."""
    assert tokens(await answers(*ranks(world_size))) == alone


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"), max_position_embeddings=2048)


async def stream(client: AsyncClient, count: int, received: list[int], adapter: str = "") -> None:
    async for event in client.generate(
        prompt=TINY_PROMPT,
        max_tokens=count,
        temperature=0.0,
        ignore_eos=True,
        adapter=adapter,
        timeout=LIMIT_S,
    ):
        if isinstance(event, Delta):
            received += event.token_ids


async def until(reached: Callable[[], bool]) -> float:
    """Wait until something is so; return the seconds that took."""
    started = time.monotonic()
    while not reached():
        assert time.monotonic() < started + LIMIT_S
        await asyncio.sleep(0.01)
    return time.monotonic() - started


FP8 = ("--kv-cache-dtype", "fp8")
"""The new rank has no scales: all measure again, and those that stayed keep theirs."""


@pytest.mark.parametrize("flags", [(), pytest.param(FP8, marks=pytest.mark.slow)])
async def test_a_killed_rank_is_a_pause(flags: tuple[str, ...], tiny: Path) -> None:
    with serving(str(tiny), *ranks(2), *flags) as served:
        async with AsyncClient(served.address) as client:
            expected: list[int] = []
            await stream(client, 200, expected)
            found: list[int] = []
            streaming = asyncio.create_task(stream(client, 200, found))
            await until(lambda: len(found) >= 20)
            os.kill(min(served.workers()), signal.SIGKILL)
            await streaming
            assert found == expected
            (group,) = (await client.server_info()).groups
    assert group.epoch == 2
    assert [worker.rank for worker in group.workers] == [0, 1]
    # Neither the loss nor the end of the server shows stacks of torch's.
    assert "frame #" not in served.log()


@pytest.mark.slow
async def test_a_rank_that_comes_for_a_killed_one_has_the_adapters(
    tiny: Path, tmp_path: Path
) -> None:
    write_adapter(tmp_path / "poet")
    with serving(str(tiny), *ranks(2), "--adapter-dir", str(tmp_path)) as served:
        async with AsyncClient(served.address) as client:
            with pytest.raises(PagemillError, match="where nothing is below adapter_dir"):
                await client.load_adapter("cook", "cook")
            await client.load_adapter("poet", "poet")
            plain: list[int] = []
            await stream(client, 200, plain)
            expected: list[int] = []
            await stream(client, 200, expected, "poet")
            assert expected != plain
            found: list[int] = []
            streaming = asyncio.create_task(stream(client, 200, found, "poet"))
            await until(lambda: len(found) >= 20)
            os.kill(max(served.workers()), signal.SIGKILL)
            await streaming
            assert found == expected
            assert [each.name for each in await client.adapters()] == ["poet"]


@pytest.mark.slow
async def test_a_rank_that_hangs_is_seen_within_the_heartbeat_bound_and_a_stand_by_takes_its_place(
    tiny: Path, socket_path: Path
) -> None:
    dial = f"unix:{socket_path}"
    with serving(str(tiny), *ranks(2), "--worker-listen", dial) as served:
        command = [sys.executable, "-m", "worker_svc", str(tiny), "--join", dial]
        command += ["--device", "cpu", "--dtype", "float32", "--threads", "1"]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as stand_by:
            try:
                await hang_a_rank(served)
            finally:
                stand_by.kill()


async def hang_a_rank(served: Served) -> None:
    victim = max(served.workers())
    async with AsyncClient(served.address) as client:
        expected: list[int] = []
        await stream(client, 200, expected)
        found: list[int] = []
        streaming = asyncio.create_task(stream(client, 200, found))
        await until(lambda: len(found) >= 20)
        os.kill(victim, signal.SIGSTOP)
        try:
            taken_s = await until(lambda: "no heartbeat for" in served.log())
            await streaming
        finally:
            os.kill(victim, signal.SIGCONT)
        assert found == expected
    assert taken_s < 2 * HEARTBEAT_BOUND_S  # twice the bound, for a busy machine
