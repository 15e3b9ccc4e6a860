"""Operators and tools see the server as it is, and can end requests, drain and flush."""

import asyncio
import io
import json
import random
import zipfile
from collections.abc import AsyncIterator, Awaitable
from hashlib import sha256
from pathlib import Path

import grpc
import pytest
import tokenizers
from grpc import aio

from front_end_loopback import Loopback, facts, front_end, loopback
from pagemill.v1.admin_pb2 import DrainRequest, FlushCacheRequest
from pagemill.v1.control_pb2 import (
    AbortRequest,
    ExplainRequest,
    GetLoadRequest,
    GetModelInfoRequest,
    GetServerInfoRequest,
    GetTokenizerRequest,
)
from pagemill.v1.generation_pb2 import FINISH_REASON_ABORT
from pagemill.v1.inference_pb2 import GenerateRequest, GenerateResponse
from scheduler_svc.service.step_record import StepTimes
from scheduler_svc.service.text.model_facts import ModelFacts
from scheduler_svc.service.text.tokenizer import Tokenizer


@pytest.fixture
async def served() -> AsyncIterator[Loopback]:
    async with loopback() as served:
        yield served


async def test_the_server_says_what_it_is(served: Loopback) -> None:
    info = await served.control.GetServerInfo(GetServerInfoRequest())
    assert (info.version, info.protocol_version, info.incarnation) == ("1.2.3", 1, 42)
    assert list(info.model_names) == ["toy", "toy-alias"]
    assert (info.block_size, info.max_num_seqs, info.max_num_batched_tokens) == (4, 8, 32)
    assert (info.max_model_len, info.pipeline_depth) == (64, 2)
    (group,) = info.groups
    assert (group.group, group.ready, group.epoch, group.num_blocks) == (0, True, 3, 10)
    (worker,) = group.workers
    assert (worker.rank, worker.boot_id, worker.device) == (0, 77, "cpu")
    assert (worker.dtype, worker.phase) == ("float32", "idle")


async def test_the_model_is_described_under_each_of_its_names(served: Loopback) -> None:
    for asked, name in (("", "toy"), ("toy-alias", "toy-alias")):
        info = await served.control.GetModelInfo(GetModelInfoRequest(model=asked))
        assert (info.model, info.architecture, info.vocab_size) == (name, "llama", 272)
        assert (info.max_model_len, list(info.eos_token_ids)) == (64, [256, 258])
        assert (info.has_chat_template, info.fingerprint) == (True, "f1")
    with pytest.raises(aio.AioRpcError, match="'gpt' is not served") as refused:
        await served.control.GetModelInfo(GetModelInfoRequest(model="gpt"))
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND


async def test_load_is_told_with_the_times_of_recent_steps(served: Loopback) -> None:
    load = await served.control.GetLoad(GetLoadRequest())
    assert (load.running, load.waiting, load.waiting_tokens) == (0, 1, 7)
    blocks = (load.used_blocks, load.idle_cached_blocks, load.free_blocks, load.total_blocks)
    assert blocks == (3, 2, 5, 10)
    totals = load.totals
    assert (totals.prompt_tokens, totals.generation_tokens) == (11, 22)
    assert (totals.prefix_queries, totals.prefix_hits) == (33, 12)
    assert (totals.preemptions, totals.recomputed_tokens) == (4, 5)
    assert not load.HasField("recent_steps")

    served.door.recent = StepTimes(9, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)
    recent = (await served.control.GetLoad(GetLoadRequest())).recent_steps
    assert (recent.steps, recent.schedule_s, recent.encode_s, recent.wire_s) == (9, 1, 2, 3)
    assert (recent.worker_wait_s, recent.model_s, recent.emit_s, recent.step_s) == (4, 5, 6, 7)


async def test_live_requests_are_aborted_and_others_named(served: Loopback) -> None:
    served.door.step_s = 0.01
    streams = []
    for number in range(3):
        request = GenerateRequest(request_id=f"r{number}", text="ab")
        stream = aiter(served.inference.Generate(request))
        await anext(stream)
        streams.append(stream)
    answer = await served.control.Abort(AbortRequest(request_ids=["r1", "x"]))
    assert (list(answer.aborted), list(answer.unknown)) == (["r1"], ["x"])
    assert await reason_of(streams[1]) == FINISH_REASON_ABORT
    answer = await served.control.Abort(AbortRequest(all=True))
    assert sorted(answer.aborted) == ["r0", "r2"]
    assert [await reason_of(streams[0]), await reason_of(streams[2])] == [FINISH_REASON_ABORT] * 2
    assert not (await served.control.Abort(AbortRequest(all=True))).aborted


async def test_a_tenant_ends_its_own_requests_only(served: Loopback) -> None:
    served.door.step_s = 0.01
    streams = {}
    for tenant in ("a", "b"):
        asked = GenerateRequest(request_id="same", tenant=tenant, text="ab")
        streams[tenant] = aiter(served.inference.Generate(asked))
        await anext(streams[tenant])
    with pytest.raises(aio.AioRpcError) as refused:
        await served.control.Abort(AbortRequest(request_ids=["same"]))
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    assert not (await served.control.Abort(AbortRequest(all=True))).aborted
    answer = await served.control.Abort(AbortRequest(request_ids=["same"], tenant="a"))
    assert list(answer.aborted) == ["same"]
    assert await reason_of(streams["a"]) == FINISH_REASON_ABORT
    assert [tenant for tenant, _ in served.door.live] == ["b"]
    await served.control.Abort(AbortRequest(all=True, tenant="b"))
    assert await reason_of(streams["b"]) == FINISH_REASON_ABORT


async def test_an_operator_ends_the_requests_of_all_tenants(served: Loopback) -> None:
    served.door.step_s = 0.01
    streams = []
    for tenant in ("", "a", "b"):
        asked = GenerateRequest(request_id="same", tenant=tenant, text="ab")
        streams.append(aiter(served.inference.Generate(asked)))
        await anext(streams[-1])
    answer = await served.control.Abort(AbortRequest(all_tenants=True))
    assert list(answer.aborted) == ["same"] * 3
    assert [await reason_of(stream) for stream in streams] == [FINISH_REASON_ABORT] * 3
    assert not (await served.control.Abort(AbortRequest(all_tenants=True))).aborted


async def reason_of(stream: AsyncIterator[GenerateResponse]) -> int:
    *_, last = [response async for response in stream]
    return last.finished[0].reason


@pytest.mark.parametrize(
    ("ids", "code", "words"),
    [
        (["x", "y"], grpc.StatusCode.NOT_FOUND, "none of the 2 request_ids is live"),
        ([], grpc.StatusCode.INVALID_ARGUMENT, "request_ids has 0 ids, must have 1 to 10000"),
        (["x"] * 10_001, grpc.StatusCode.INVALID_ARGUMENT, "request_ids has 10001 ids"),
    ],
)
async def test_aborting_nothing_that_lives_is_an_error(
    served: Loopback, ids: list[str], code: grpc.StatusCode, words: str
) -> None:
    with pytest.raises(aio.AioRpcError, match=words) as refused:
        await served.control.Abort(AbortRequest(request_ids=ids))
    assert refused.value.code() is code


async def tokenizer_files(model: ModelFacts) -> dict[str, bytes]:
    """Fetch the archive over a server of this model, and check how it was sent."""
    async with loopback(front_end(model)) as served:
        responses = [r async for r in served.control.GetTokenizer(GetTokenizerRequest())]
    content = b"".join(response.chunk for response in responses)
    assert all(len(response.chunk) <= 1 << 20 for response in responses)
    assert [bool(response.sha256) for response in responses[:-1]] == [False] * (len(responses) - 1)
    assert responses[-1].sha256 == sha256(content).hexdigest()
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


async def test_a_directory_gives_away_its_tokenizer_and_nothing_else(tmp_path: Path) -> None:
    given = {"tokenizer.json": b"{}", "config.json": b"[]", "chat_template.jinja": b"x"}
    # What cannot be compressed takes several messages.
    given["tokenizer_config.json"] = random.Random(0).randbytes(3 << 20)
    for name, content in {**given, "model.safetensors": b"weights", "secret": b"x"}.items():
        (tmp_path / name).write_bytes(content)
    assert await tokenizer_files(facts(tmp_path)) == given


async def test_a_gguf_files_tokenizer_can_be_used_elsewhere(demo_gguf: Path) -> None:
    model = ModelFacts.from_path(demo_gguf)
    files = await tokenizer_files(model)
    assert files.keys() == {"tokenizer.json", "tokenizer_config.json"}
    config = json.loads(files["tokenizer_config.json"])
    assert config["chat_template"] == model.chat_template
    assert config["eos_token"] == model.special_tokens["eos_token"]
    elsewhere = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
    text = "Grüße, 12345 times!\n<|im_end|>"
    assert elsewhere.encode(text).ids == Tokenizer.from_path(demo_gguf).encode(text)


async def test_a_drain_ends_when_the_last_request_has(served: Loopback) -> None:
    served.door.step_s = 0.01
    stream = aiter(served.inference.Generate(GenerateRequest(request_id="r1", text="ab")))
    await anext(stream)
    drain = asyncio.ensure_future(served.admin.Drain(DrainRequest()))
    while not served.door.draining:
        await asyncio.sleep(0.01)
    with pytest.raises(aio.AioRpcError) as refused:
        await anext(aiter(served.inference.Generate(GenerateRequest(text="ab"))))
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert not drain.done()
    await served.control.Abort(AbortRequest(all=True))
    await reason_of(stream)
    await asyncio.wait_for(drain, 5)
    await served.admin.Drain(DrainRequest(resume=True))
    await anext(aiter(served.inference.Generate(GenerateRequest(text="ab"))))


async def test_a_drain_that_takes_too_long_runs_into_its_deadline(served: Loopback) -> None:
    served.door.step_s = 0.01
    stream = aiter(served.inference.Generate(GenerateRequest(text="ab")))
    await anext(stream)
    with pytest.raises(aio.AioRpcError) as refused:
        await served.admin.Drain(DrainRequest(), timeout=0.1)
    assert refused.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_the_cache_can_be_flushed(served: Loopback) -> None:
    assert (await served.admin.FlushCache(FlushCacheRequest())).num_blocks == 2


async def test_what_comes_later_says_so(served: Loopback) -> None:
    calls: dict[str, Awaitable[object]] = {
        "Control.Explain": served.control.Explain(ExplainRequest()),
    }
    for name, call in calls.items():
        with pytest.raises(aio.AioRpcError, match=f"{name} is not served") as refused:
            await call
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
