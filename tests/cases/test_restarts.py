"""Area g of the public cases: workers that restart, and workers that do not fit."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from grpc import aio

from cases.conftest import Reference
from cases.stack import RecordingHost, Stack, serving, start_worker, until
from pagemill.v1 import admin_pb2, admin_pb2_grpc, worker_pb2
from worker_svc.service import joining
from worker_svc.service.exit_status import ExitStatus

PROMPT = list(range(10, 34))


async def _eight(stack: Stack, prompt: list[int]) -> tuple[int, list[int]]:
    """Return cached tokens and eight tokens of output."""
    reply = await stack.client.complete(prompt=prompt, temperature=0, max_tokens=8, ignore_eos=True)
    return reply.usage.cached_tokens, list(reply.token_ids)


async def test_case_G_08_a_worker_that_restarts_has_nothing_cached(
    bench_r: Path, reference: Reference
) -> None:
    expected = reference(PROMPT, 8)
    async with serving(bench_r, num_blocks=None, join=False) as stack:
        await stack.add_worker(num_blocks=64)
        assert await _eight(stack, PROMPT) == (0, expected)
        assert await _eight(stack, PROMPT) == (20, expected)
        await stack.stop_worker()
        # Another process: its pool is NaN where it wrote nothing. Then one of half the size.
        for num_blocks in (64, 32):
            await stack.add_worker(num_blocks=num_blocks)
            assert await _eight(stack, PROMPT) == (0, expected)
            others = [[n, *PROMPT[1:]] for n in range(100, 110)]
            found = await asyncio.gather(*(_eight(stack, prompt) for prompt in others))
            assert found == [(0, reference(prompt, 8)) for prompt in others]
            assert (await stack.idle()).total_blocks == num_blocks
            blocks = {block for step in stack.steps for row in step for block in row.blocks}
            assert blocks <= set(range(1, num_blocks + 1))
            assert max(blocks) > 16
            await stack.stop_worker()


async def test_case_G_08_other_weights_are_refused(bench_r: Path, reference: Reference) -> None:
    async with serving(bench_r) as stack:
        assert await _eight(stack, PROMPT) == (0, reference(PROMPT, 8))
        fingerprint = stack.workers[0].host.model.fingerprint
        await stack.stop_worker()
        host = RecordingHost(bench_r, None, 0)
        host.model.fingerprint = "ab" * 32
        other = start_worker(host, stack.worker_address)
        await until(lambda: bool(other.status))
        assert other.status == [ExitStatus.REFUSED]
        assert f"fingerprint is {'ab' * 32}, must be {fingerprint}" in other.log.getvalue()
        assert not stack.engine.serving
        await stack.add_worker()
        assert await _eight(stack, PROMPT) == (0, reference(PROMPT, 8))


async def test_case_G_08_a_flush_leaves_running_requests_alone(
    bench_r: Path, reference: Reference
) -> None:
    prompts = [[n, *PROMPT[1:]] for n in (60, 61, 62)]
    async with serving(bench_r, step_s=0.01) as stack:
        calls = [asyncio.create_task(_eight(stack, prompt)) for prompt in prompts]
        await until(lambda: stack.scheduler.counters.generation_tokens > 6)
        async with aio.insecure_channel(stack.address) as channel:
            flush = admin_pb2_grpc.AdminStub(channel).FlushCache
            assert (await flush(admin_pb2.FlushCacheRequest())).num_blocks > 0
        assert [(await call)[1] for call in calls] == [reference(p, 8) for p in prompts]
        await stack.idle()
        assert (await _eight(stack, prompts[0]))[1] == reference(prompts[0], 8)


def _groups(**changes: int) -> dict[str, Any]:
    numbers = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 16} | changes
    return {"kv_groups": [worker_pb2.KvGroup(**numbers)]}


# What differs, and words of the refusal: the field and both values. The block size is the
# scheduler's word, so that no worker can have another.
DIFFERENT: dict[str, tuple[dict[str, Any], str]] = {
    "kv dtype": ({"kv_dtype": "float8_e4m3fn"}, "kv_dtype is float8_e4m3fn, must be float32"),
    "dtype": ({"dtype": "bfloat16"}, "dtype is bfloat16, must be float32"),
    "layers": (_groups(num_layers=3), "num_layers: 3 .*must be .*num_layers: 2"),
    "heads": (_groups(num_kv_heads=4), "num_kv_heads: 4 .*must be .*num_kv_heads: 2"),
    "head size": (_groups(head_dim=32), "head_dim: 32.*must be .*head_dim: 16"),
    "model": ({"fingerprint": "cd" * 32}, f"fingerprint is {'cd' * 32}, must be [0-9a-f]+"),
    "length": ({"max_position_embeddings": 100}, "max_position_embeddings is 100.*512"),
    "vocabulary": ({"vocab_size": 300}, "vocab_size is 300, must be 272"),
}


@pytest.mark.parametrize("what", [*DIFFERENT, "protocol", "devices"])
async def test_case_G_09_a_worker_that_does_not_fit_is_refused_by_name(
    what: str, bench_r: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(bench_r) as stack:
        host = RecordingHost(bench_r, None, 0)
        changes, words = DIFFERENT.get(what, ({}, ""))
        for name, value in changes.items():
            host.model.ClearField(name)  # type: ignore[arg-type]  # a field's name
            host.model.MergeFrom(worker_pb2.ModelFacts(**{name: value}))
        if what == "protocol":
            monkeypatch.setattr(joining, "PROTOCOL_VERSION", 2)
            words = "protocol_version is 2, must be 1"
        if what == "devices":
            monkeypatch.setattr(worker_pb2, "WorkerHello", _without_devices(worker_pb2.WorkerHello))
            words = "devices is 0, must be at least 1"
        # While another serves, which goes on; and when there is none.
        for _ in range(2):
            worker = start_worker(host, stack.worker_address)
            await until(lambda status=worker.status: bool(status))  # type: ignore[misc]  # typeshed
            assert worker.status == [ExitStatus.REFUSED] != [0]
            log = worker.log.getvalue().replace("\\n", " ")
            assert re.search(words, log), log
            if stack.engine.serving:
                assert (await _eight(stack, PROMPT))[1] == reference(PROMPT, 8)
                await stack.stop_worker()
            assert not await stack.client.health()


def _without_devices(hello: Any) -> Any:
    def make(**fields: Any) -> worker_pb2.WorkerHello:
        return hello(**{**fields, "devices": []})  # type: ignore[no-any-return]

    return make
