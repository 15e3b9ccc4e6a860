"""Area j of the public cases: pickles and unbounded work."""

import asyncio
import pickle
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc import aio

from cases.stack import RecordingHost, held, serving, start_worker, until
from cases.table_llama import successors_of, write_table_llama
from pagemill.client import (
    AsyncClient,
    Event,
    ResourceExhaustedError,
    RetryPolicy,
)
from pagemill.v1 import admin_pb2, control_pb2, generation_pb2, inference_pb2, worker_pb2
from pagemill.v1.inference_pb2 import GenerateRequest
from raw_connections import connection
from scheduler_process import is_serving, scheduler
from scheduler_svc.config import SchedulerSettings
from worker_svc.errors import ModelError
from worker_svc.service.exit_status import ExitStatus

MIB = 1 << 20
GENERATE = "/pagemill.v1.Inference/Generate"


# J-01. tests/repo/test_source_rules.py proves that no product code unpickles or evaluates.


class Canary:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (str(self._path), "w"))


def _with_bytes(message: Message, payload: bytes, depth: int = 4) -> Message:
    """Put `payload` into every bytes field of a message, however deep."""
    for field in message.DESCRIPTOR.fields:
        repeated = field.is_repeated
        if field.type == FieldDescriptor.TYPE_BYTES:
            if repeated:
                getattr(message, field.name).append(payload)
            else:
                setattr(message, field.name, payload)
        elif field.message_type is not None and depth:
            if field.message_type.GetOptions().map_entry:
                continue
            inner = getattr(message, field.name)
            _with_bytes(inner.add() if repeated else inner, payload, depth - 1)
    return message


def _methods() -> Iterator[MethodDescriptor]:
    for module in (inference_pb2, control_pb2, admin_pb2, worker_pb2):
        for service in module.DESCRIPTOR.services_by_name.values():
            yield from service.methods


async def _call(channel: aio.Channel, method: MethodDescriptor, data: bytes) -> None:
    """Send bytes as the request of any method; it must end, and not well if they are no message."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    calls: dict[tuple[bool, bool], Any] = {
        (False, False): channel.unary_unary,
        (False, True): channel.unary_stream,
        (True, True): channel.stream_stream,
    }
    call = calls[method.client_streaming, method.server_streaming](path)
    request = iter([data]) if method.client_streaming else data
    with suppress(aio.AioRpcError):
        if method.server_streaming:
            async for _ in call(request, timeout=3):
                break
        else:
            await call(request, timeout=3)


async def _status(channel: aio.Channel, data: bytes) -> grpc.StatusCode:
    """Return how a generation ends whose request is these bytes."""
    generate: Any = channel.unary_stream(GENERATE)
    call = generate(data, timeout=30)
    code: grpc.StatusCode = await call.code()
    return code


async def test_case_J_01_a_pickle_is_nowhere_loaded(bench_t: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    payload = pickle.dumps(Canary(canary))
    async with scheduler(bench_t) as served:
        for address in (served.address, served.workers):
            host, _, port = address.rpartition(":")
            async with connection(int(port), host) as (reader, writer):
                writer.write(payload)
                await writer.drain()
                writer.write_eof()
                await asyncio.wait_for(reader.read(), 30)
        async with (
            aio.insecure_channel(served.address) as public,
            aio.insecure_channel(served.workers) as workers,
        ):
            for method in _methods():
                if method.name == "Drain":
                    continue  # takes what it is given, and drains
                channel = workers if method.containing_service.name == "Worker" else public
                message = _with_bytes(GetMessageClass(method.input_type)(), payload)
                for data in (payload, message.SerializeToString()):
                    await _call(channel, method, data)
            assert await _status(public, payload) is grpc.StatusCode.INVALID_ARGUMENT
            # It lives: without a worker it serves nothing, but it answers.
            assert not await is_serving(public)
        assert served.process.returncode is None
    # As the checkpoint.
    model = write_table_llama(tmp_path / "model")
    (model / "model.safetensors").write_bytes(payload)
    with pytest.raises(ModelError, match="damaged"):
        RecordingHost(model, 8, 0)
    assert not canary.exists()


async def test_case_J_01_workers_need_the_secret_and_the_port_is_loopbacks(bench_t: Path) -> None:
    assert SchedulerSettings(model_path="m").worker_listen.startswith("127.0.0.1:")
    async with serving(bench_t, join=False, join_secret="open sesame") as stack:
        worker = start_worker(RecordingHost(bench_t, None, 0), stack.worker_address)
        await until(lambda: bool(worker.status))
        assert worker.status == [ExitStatus.REFUSED]
        assert "join_secret does not match" in worker.log.getvalue()


# J-02.


def _asking(**fields: Any) -> bytes:
    good: dict[str, Any] = {"token_ids": generation_pb2.TokenIds(ids=[1])}
    return GenerateRequest(**{**good, **fields}).SerializeToString()


def _sampling(**fields: Any) -> bytes:
    return _asking(sampling=generation_pb2.Sampling(**fields))


HUGE: dict[str, Callable[[], bytes]] = {
    "n": lambda: _sampling(n=10**9),
    "n and max_tokens": lambda: _asking(
        sampling=generation_pb2.Sampling(n=200), stopping=generation_pb2.Stopping(max_tokens=4000)
    ),
    "logprobs": lambda: _asking(output=inference_pb2.OutputOptions(logprobs=10**6)),
    "beam width": lambda: _asking(beam=generation_pb2.BeamSearch(width=10**6)),
    "100,000 stops": lambda: _asking(stopping=generation_pb2.Stopping(stop=["x"] * 100_000)),
    "a stop of 10 MB": lambda: _asking(stopping=generation_pb2.Stopping(stop=["x" * 10_000_000])),
    "logit_bias": lambda: _sampling(logit_bias=dict.fromkeys(range(1_000_000), 1.0)),
    "5,000,000 ids": lambda: _asking(token_ids=generation_pb2.TokenIds(ids=[1] * 5_000_000)),
    "id of 1 MB": lambda: _asking(request_id="x" * 1_000_000),
}


# gRPC takes messages of up to 64 MiB, and parsing one of 10 MB costs more than the case allows:
# tests/cases/README.md. These bars are what it costs today.
LARGER = {"a stop of 10 MB": 80_000_000, "5,000,000 ids": 90_000_000, "logit_bias": 150_000_000}


def _peak_bytes(process: int, *, reset: bool = False) -> int:
    if reset:
        Path(f"/proc/{process}/clear_refs").write_text("5")
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmHWM")


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of memory from /proc")
async def test_case_J_02_what_is_too_much_is_refused_before_it_costs(bench_t: Path) -> None:
    async with scheduler(bench_t, "--max-model-len", "4096") as served:
        options = [("grpc.max_send_message_length", 64 * MIB)]
        worker = start_worker(RecordingHost(bench_t, 256, 0.002), served.workers)
        async with (
            aio.insecure_channel(served.address, options=options) as channel,
            AsyncClient(served.address) as client,
        ):
            await until(lambda: bool(worker.host.steps) or "joined" in worker.log.getvalue())
            background = asyncio.create_task(
                client.complete(prompt=[0], temperature=0, max_tokens=1000, ignore_eos=True)
            )
            found: dict[str, tuple[str, bool, bool]] = {}
            for name, make in HUGE.items():
                request = make()
                before = _peak_bytes(served.process.pid, reset=True)
                begin = time.monotonic()
                code = await _status(channel, request)
                taken = time.monotonic() - begin
                more = _peak_bytes(served.process.pid) - before
                found[name] = (code.name, taken < 3, more < LARGER.get(name, 50_000_000))
                print(name, round(taken, 3), more // MIB)
            assert {answer[1:] for answer in found.values()} == {(True, True)}, found
            codes = {answer[0] for answer in found.values()}
            assert codes <= {"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"}, found
            assert list((await background).token_ids) == successors_of(0, 1000)
        await asyncio.to_thread(worker.stop)


async def test_case_J_02_a_long_prompt_is_scored_beside_others(bench_t: Path) -> None:
    prompt = [position % 256 for position in range(5_999)] + [7]
    async with serving(bench_t, num_blocks=2_200, max_num_seqs=4, max_logprobs=20) as stack:
        background = asyncio.create_task(
            stack.client.complete(prompt=[0], temperature=0, max_tokens=600, ignore_eos=True)
        )
        await until(lambda: stack.scheduler.num_running == 1)
        scored = await stack.client.complete(
            prompt=prompt, temperature=0, max_tokens=1, prompt_logprobs=20
        )
        nothing, *told = scored.summary.prompt_logprobs
        assert (nothing, len(told)) == ((), 5_999)
        for token, position in zip(prompt[1:], told, strict=True):
            assert position[0].token_id == token
            assert len({each.token_id for each in position}) == len(position) in {20, 21}
        # The table has each token behind the one before it, but for the last.
        assert all(position[0].logprob == pytest.approx(0, abs=1e-5) for position in told[:-1])
        assert told[-1][0].logprob < -10
        assert scored.token_ids == (8,)
        assert list((await background).token_ids) == successors_of(0, 600)
        await stack.idle()


@pytest.mark.parametrize(
    "count", [1_000, pytest.param(10_000, marks=pytest.mark.slow)], ids=["1000", "10000"]
)
async def test_case_J_02_the_queue_has_an_end_and_idle_streams_harm_nobody(
    bench_t: Path, count: int
) -> None:
    async with serving(bench_t, num_blocks=512, max_waiting_requests=200, max_num_seqs=8) as stack:
        background = asyncio.create_task(
            stack.client.complete(prompt=[0], temperature=0, max_tokens=1500, ignore_eos=True)
        )
        await until(lambda: stack.scheduler.num_running == 1)
        async with AsyncClient(stack.address, retry=RetryPolicy(max_attempts=1)) as client:
            # Streams that nobody reads further, a tenth of the requests.
            idle = [
                client.generate(prompt=[1], temperature=0, max_tokens=2) for _ in range(count // 10)
            ]
            begun = await asyncio.gather(*map(_begin, idle))

            async def small(number: int) -> str:
                with suppress(ResourceExhaustedError):
                    reply = await client.complete(
                        prompt=[number % 250], temperature=0, max_tokens=1, timeout=120
                    )
                    assert reply.token_ids == (number % 250 + 1,)
                    return "served"
                return "refused"

            with held(stack):
                sends = [asyncio.create_task(small(number)) for number in range(count)]
                await until(lambda: stack.scheduler.num_waiting == 200)
                await until(lambda: any(send.done() for send in sends))
            answers = await asyncio.gather(*sends)
            assert set(answers) == {"served", "refused"}
            assert any(begun)
            for events in idle:
                await events.aclose()
        assert list((await background).token_ids) == successors_of(0, 1500)
        await stack.idle()


async def _begin(events: AsyncGenerator[Event, None]) -> bool:
    """Read the first message. False: there was no room in the queue."""
    try:
        await anext(events)
    except ResourceExhaustedError:
        return False
    return True
