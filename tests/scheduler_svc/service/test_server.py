"""The process from start to end: what it prints, when it serves, how it stops."""

import asyncio
import contextlib
import json
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc import aio
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from fake_worker import generate_alone
from fake_worker_process import Connection, WireWorker, working
from pagemill.v1.admin_pb2 import PinRequest, UnpinRequest
from pagemill.v1.admin_pb2_grpc import AdminStub
from pagemill.v1.control_pb2 import SubscribeKvEventsRequest
from pagemill.v1.control_pb2_grpc import ControlStub
from raw_connections import connection
from scheduler_process import (
    Answer,
    SchedulerProcess,
    generate,
    is_serving,
    model_hello,
    scheduler,
    start,
    stream,
    until_serving,
    write_model,
)
from scheduler_svc.core.hash_algorithms import HASH_ALGORITHMS

PROMPT = [1, 2, 0, 1, 1, 2, 0]
SERVICES = ("pagemill.v1.Inference", "pagemill.v1.Control", "pagemill.v1.Admin")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def fake_worker() -> WireWorker:
    return WireWorker(4, 400)


async def test_it_serves_once_a_worker_is_ready_and_ends_with_status_0(model: Path) -> None:
    async with scheduler(model) as running, aio.insecure_channel(running.address) as channel:
        assert not await is_serving(channel)
        async with working(running.workers, fake_worker(), model_hello()) as worker:
            await until_serving(channel)
            for service in SERVICES:
                assert await is_serving(channel, service)
            answer = await generate(channel, PROMPT, 12)
            assert answer == Answer(generate_alone(PROMPT, 12, frozenset()))
            again = await generate(channel, PROMPT, 12)
            assert (again.tokens, again.cached_tokens) == (answer.tokens, 4)
            running.send(signal.SIGTERM)
            status, stdout, stderr = await running.end()
            assert worker.stopped
    assert (status, stdout) == (0, "")
    assert "Traceback" not in stderr


@pytest.mark.parametrize("algorithm", HASH_ALGORITHMS)
async def test_prefixes_are_hit_under_every_algorithm_and_a_weak_one_is_told(
    model: Path, algorithm: str
) -> None:
    flags = ("--prefix-caching-hash-algo", algorithm, "--hash-seed", "0")
    async with (
        scheduler(model, *flags) as running,
        aio.insecure_channel(running.address) as channel,
        working(running.workers, fake_worker(), model_hello()),
    ):
        await until_serving(channel)
        answers = [await generate(channel, PROMPT, 4) for _ in range(2)]
        running.send(signal.SIGTERM)
        status, _, stderr = await running.end()
    assert [answer.cached_tokens for answer in answers] == [0, 4]
    told = "trusted input of a single tenant only" in stderr
    assert (status, told) == (0, algorithm.startswith("xxhash"))


async def test_reflection_names_the_services(model: Path) -> None:
    async with scheduler(model) as running, aio.insecure_channel(running.address) as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        answer = await call.read()
        await call.done_writing()
    names = {service.name for service in answer.list_services_response.service}
    assert names == {
        *SERVICES,
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where the path of a socket stays below the 103 bytes that all systems take."""
    with tempfile.TemporaryDirectory(prefix="pagemill-") as folder:
        yield Path(folder)


async def test_unix_sockets_serve_both_sides(model: Path, folder: Path) -> None:
    listen, worker_listen = f"unix:{folder}/clients", f"unix:{folder}/workers"
    async with scheduler(model, listen=listen, worker_listen=worker_listen) as running:
        assert (running.address, running.workers) == (listen, worker_listen)
        status, _, stderr = await finished(str(model), "--listen", listen)
        assert status == 2
        assert stderr.startswith(f"listen is {listen}, which cannot be had: ")
        async with (
            aio.insecure_channel(listen) as channel,
            working(worker_listen, fake_worker(), model_hello()),
        ):
            await until_serving(channel)
            answer = await generate(channel, PROMPT, 5)
            assert answer.tokens == generate_alone(PROMPT, 5, frozenset())


async def begin(channel: aio.Channel, count: int) -> tuple["asyncio.Task[Answer]", Answer]:
    """Start a call and wait for its first token."""
    answer = Answer([])
    some = asyncio.Event()

    async def follow() -> Answer:
        async for _ in stream(channel, PROMPT, count, answer):
            if answer.tokens:
                some.set()
        return answer

    task = asyncio.create_task(follow())
    async with asyncio.timeout(20):
        await some.wait()
    return task, answer


async def pause_after(worker: Connection, num_plans: int) -> None:
    async with asyncio.timeout(20):
        while len(worker.plans) < num_plans:
            await asyncio.sleep(0.001)
    worker.gate.clear()


async def test_sigterm_lets_requests_end_and_refuses_new_ones(model: Path) -> None:
    async with (
        scheduler(model) as running,
        aio.insecure_channel(running.address) as channel,
        working(running.workers, fake_worker(), model_hello()) as worker,
    ):
        await until_serving(channel)
        call, _ = await begin(channel, 60)
        await pause_after(worker, 5)
        running.send(signal.SIGTERM)
        await until_serving(channel, serving=False)
        refused = await generate(channel, PROMPT, 5)
        assert (refused.code, refused.tokens) == (grpc.StatusCode.UNAVAILABLE, [])
        assert "drains" in refused.details
        worker.gate.set()
        assert await call == Answer(generate_alone(PROMPT, 60, frozenset()))
        assert (await running.end())[0] == 0
        assert worker.stopped


async def test_at_the_drain_limit_a_long_request_keeps_what_it_has(model: Path) -> None:
    async with (
        scheduler(model, "--drain-timeout", "0.2") as running,
        aio.insecure_channel(running.address) as channel,
        working(running.workers, fake_worker(), model_hello()) as worker,
    ):
        await until_serving(channel)
        call, _ = await begin(channel, 900)
        await pause_after(worker, 5)
        running.send(signal.SIGTERM)
        answer = await call
        assert answer.code is grpc.StatusCode.UNAVAILABLE
        assert "0.2 s to end have passed" in answer.details
        assert answer.tokens
        assert answer.tokens == generate_alone(PROMPT, len(answer.tokens), frozenset())
        worker.gate.set()
        assert (await running.end())[0] == 0


async def test_a_second_signal_stops_at_once(model: Path) -> None:
    async with (
        scheduler(model) as running,
        aio.insecure_channel(running.address) as channel,
        working(running.workers, fake_worker(), model_hello()) as worker,
    ):
        await until_serving(channel)
        call, _ = await begin(channel, 900)
        await pause_after(worker, 5)
        running.send(signal.SIGTERM)
        await until_serving(channel, serving=False)
        running.send(signal.SIGTERM)
        async with asyncio.timeout(5):
            status, _, stderr = await running.end()
        assert status == 1
        assert "Traceback" not in stderr
        assert (await call).code is not grpc.StatusCode.OK


async def test_a_request_outlives_its_worker_process(model: Path) -> None:
    async with (
        scheduler(model) as running,
        aio.insecure_channel(running.address) as channel,
    ):
        async with working(running.workers, fake_worker(), model_hello(1)) as worker:
            await until_serving(channel)
            call, _ = await begin(channel, 80)
            await pause_after(worker, 5)
        await until_serving(channel, serving=False)
        async with working(running.workers, fake_worker(), model_hello(2)):
            assert await call == Answer(generate_alone(PROMPT, 80, frozenset()))


async def test_a_cancelled_call_leaves_nothing_behind(model: Path) -> None:
    async with (
        scheduler(model, "--num-gpu-blocks-override", "4") as running,
        aio.insecure_channel(running.address) as channel,
        working(running.workers, WireWorker(4, 4), model_hello()),
    ):
        await until_serving(channel)
        call, _ = await begin(channel, 10)
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await call
        # It needs the whole pool.
        answer = await generate(channel, PROMPT, 10)
        assert answer.tokens == generate_alone(PROMPT, 10, frozenset())


async def finished(*arguments: str, program: str | None = None) -> tuple[int, str, str]:
    """Run a scheduler that does not come up."""
    process = await (start(*arguments, program=program) if program else start(*arguments))
    try:
        async with asyncio.timeout(60):
            stdout, stderr = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
    return process.returncode or 0, stdout.decode(), stderr.decode()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
async def test_a_log_that_cannot_be_written_ends_nothing(model: Path) -> None:
    listen = ("--listen", "127.0.0.1:0", "--worker-listen", "127.0.0.1:0")
    with Path("/dev/full").open("wb", buffering=0) as full:
        process = await start(str(model), *listen, stderr=full)
    assert process.stdout is not None
    async with asyncio.timeout(60):
        assert (await process.stdout.readline()).startswith(b"listening ")
        process.send_signal(signal.SIGTERM)
        await process.communicate()
    assert process.returncode == 0


async def test_what_is_impossible_is_one_line_and_status_2(model: Path) -> None:
    async with scheduler(model) as running:
        impossible = {
            ("--listen", running.address): f"listen is {running.address}, which cannot be had: ",
            ("--metrics-listen", running.address): f"metrics_listen is {running.address}, which",
            ("--max-model-len", "5000"): "max_model_len is 5000, must be at most 4096",
            ("--tensor-parallel-size", "5"): "tensor_parallel_size is 5, must be at most 4",
        }
        free = ("--listen", "127.0.0.1:0", "--worker-listen", "127.0.0.1:0")
        outcomes = [await finished(str(model), *free, *flags) for flags in impossible]
    for (status, stdout, stderr), complaint in zip(outcomes, impossible.values(), strict=True):
        assert (status, stdout) == (2, "")
        assert stderr.startswith(complaint)
        assert stderr.count("\n") == 1


async def test_a_missing_model_is_one_line_and_status_2(tmp_path: Path) -> None:
    listen = ("--listen", "127.0.0.1:0", "--worker-listen", "127.0.0.1:0")
    status, stdout, stderr = await finished(str(tmp_path / "nowhere"), *listen)
    assert (status, stdout, stderr.count("\n")) == (2, "", 1)
    assert "nowhere" in stderr


async def test_a_model_that_no_worker_runs_is_named_in_one_line(tmp_path: Path) -> None:
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_positions": 1024}
    (tmp_path / "config.json").write_text(json.dumps(config))
    listen = ("--listen", "127.0.0.1:0", "--worker-listen", "127.0.0.1:0")
    status, stdout, stderr = await finished(str(tmp_path), *listen)
    assert (status, stdout, stderr.count("\n")) == (2, "", 1)
    assert "architectures is GPT2LMHeadModel, which is not supported; known: Llama" in stderr


FAILING = """
import sys
from scheduler_svc.__main__ import main
from scheduler_svc.core.errors import InvariantError
from scheduler_svc.service.engine import Engine

async def contradict(self):
    raise InvariantError("planted")

Engine.run = contradict
sys.exit(main())
"""


async def test_a_failed_part_ends_the_process_with_a_logged_error(model: Path) -> None:
    status, _, stderr = await finished(
        *(str(model), "--listen", "127.0.0.1:0", "--worker-listen", "127.0.0.1:0"),
        program=FAILING,
    )
    assert status == 1
    assert stderr.splitlines()[-1].count("planted") == 1
    assert all(line.startswith("timestamp=") for line in stderr.splitlines())


async def metrics_page(running: SchedulerProcess) -> str:
    """Read the page whose address the first line of the log tells."""
    if running.process.stderr is None:
        raise AssertionError("no pipe")
    async with asyncio.timeout(10):
        told = json.loads(await running.process.stderr.readline())["metrics"]
        host, _, port = told.rpartition(":")
        async with connection(int(port), host) as (reader, writer):
            writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
            return (await reader.read(-1)).decode()


async def test_pins_events_and_residency_are_served_as_set(model: Path) -> None:
    flags = (
        *("--max-pinned-share", "0.5", "--eviction-policy", "reuse-aware"),
        *("--enable-kv-cache-events", "--kv-events-buffer", "100"),
        *("--kv-cache-metrics", "--kv-cache-metrics-sample", "1"),
        *("--metrics-listen", "127.0.0.1:0", "--log-format", "json"),
    )
    async with (
        scheduler(model, *flags) as running,
        aio.insecure_channel(running.address) as channel,
        working(running.workers, WireWorker(4, 8), model_hello()),
    ):
        await until_serving(channel)
        control, admin = ControlStub(channel), AdminStub(channel)
        events = aiter(control.SubscribeKvEvents(SubscribeKvEventsRequest()))
        async with asyncio.timeout(20):
            assert (await anext(events)).snapshot
            await generate(channel, PROMPT, 4)
            (stored, *_) = (await anext(events)).events
        assert len(stored.stored.block_hashes) == 1
        pinned = await admin.Pin(PinRequest(token_ids=PROMPT, time_to_live_s=60), timeout=10)
        assert pinned.num_blocks == 1
        for token in (0, 1, 2):
            await generate(channel, [token] * 12, 4)
        assert (await generate(channel, PROMPT, 4)).cached_tokens == 4
        await admin.Unpin(UnpinRequest(pin_id=pinned.pin_id), timeout=10)
        page = await metrics_page(running)
        running.send(signal.SIGTERM)
        status, _, stderr = await running.end()
    assert status == 0
    assert '"cause": "unpinned"' in stderr
    counted = [line for line in page.splitlines() if "lifetime_seconds_count" in line]
    assert float(counted[0].split()[-1]) > 0
