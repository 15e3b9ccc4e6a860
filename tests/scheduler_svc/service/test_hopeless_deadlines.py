"""Over real gRPC: a call whose deadline cannot be kept ends at once, and with its reason."""

import asyncio
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc import aio

from fake_worker import generate_alone
from fake_worker_process import WireWorker, working
from grpc_answers import refusal_of
from pagemill.v1 import control_pb2, control_pb2_grpc, generation_pb2, inference_pb2
from pagemill.v1.inference_pb2_grpc import InferenceStub
from scheduler_process import Answer, generate, model_hello, scheduler, until_serving, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def reason_of(error: aio.AioRpcError) -> str:
    status = status_pb2.Status()
    details = dict(error.trailing_metadata())["grpc-status-details-bin"]
    assert isinstance(details, bytes)
    status.ParseFromString(details)
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    return str(info.reason)


async def test_a_hopeless_call_is_refused_long_before_its_deadline(model: Path) -> None:
    small = ("--max-num-seqs", "2", "--max-num-batched-tokens", "16")
    async with (
        scheduler(model, *small) as running,
        aio.insecure_channel(running.address) as channel,
        working(running.workers, WireWorker(4, 400), model_hello()) as worker,
    ):
        await until_serving(channel)
        worker.execute_ns = 2 * 10**9
        # They come back at once, and say they took 2 s each.
        for prompt in ([1], [2]):
            await generate(channel, prompt, 20)
        worker.gate.clear()
        others = [
            asyncio.create_task(generate(channel, [number % 3] * 15 + [number], 3))
            for number in range(40)
        ]
        control = control_pb2_grpc.ControlStub(channel)
        async with asyncio.timeout(20):
            while (await control.GetLoad(control_pb2.GetLoadRequest())).waiting < 36:
                await asyncio.sleep(0.005)

        begun_s = asyncio.get_running_loop().time()
        hurried = inference_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=[1]))
        error = await refusal_of(InferenceStub(channel).Generate(hurried, timeout=8))
        assert asyncio.get_running_loop().time() - begun_s < 4
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "the earliest start in " in (error.details() or "")
        assert reason_of(error) == "CANNOT_START_IN_TIME"
        patient = asyncio.create_task(generate(channel, [1, 1], 3, timeout_s=600))
        worker.gate.set()
        answers = await asyncio.gather(*others)
        assert await patient == Answer(generate_alone([1, 1], 3, frozenset()))
    assert [answer.tokens for answer in answers] == [
        generate_alone([number % 3] * 15 + [number], 3, frozenset()) for number in range(40)
    ]
