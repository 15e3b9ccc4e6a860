"""`python -m scheduler_svc` as a process, torch absent, with a model that has no weights."""

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import grpc
import tokenizers
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tokenizers import decoders, models, pre_tokenizers

from fake_worker_process import hello, model_facts
from pagemill.v1 import generation_pb2, inference_pb2, inference_pb2_grpc, worker_pb2

VOCAB_SIZE = 300
MAX_LENGTH = 4096
WITHOUT_TORCH = (
    "import runpy, sys; sys.modules['torch'] = None; sys.argv[0] = 'scheduler_svc'; "
    "runpy.run_module('scheduler_svc', run_name='__main__')"
)


def write_model(directory: Path) -> Path:
    """Write what a scheduler reads of a model: its numbers, and a tokenizer of bytes."""
    directory.mkdir(exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": MAX_LENGTH,
        "num_attention_heads": 4,
    }
    (directory / "config.json").write_text(json.dumps(config))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={character: id_ for id_, character in enumerate(alphabet)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(directory / "tokenizer.json"))
    return directory


def model_hello(boot_id: int = 1) -> worker_pb2.WorkerHello:
    """Return the hello of a worker that has this model."""
    facts = model_facts(vocab_size=VOCAB_SIZE)
    facts.max_position_embeddings = MAX_LENGTH
    return hello(boot_id, model=facts)


@dataclass(slots=True)
class SchedulerProcess:
    """A running scheduler, and where it listens."""

    process: asyncio.subprocess.Process
    address: str
    workers: str

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def end(self) -> tuple[int, str, str]:
        """Wait for the end; return status, and what else it said on both streams."""
        async with asyncio.timeout(30):
            stdout, stderr = await self.process.communicate()
        return self.process.returncode or 0, stdout.decode(), stderr.decode()


async def start(
    *arguments: str, program: str = WITHOUT_TORCH, stderr: int | IO[bytes] = PIPE
) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program, *arguments),
        stdout=PIPE,
        stderr=stderr,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


@asynccontextmanager
async def scheduler(
    model: Path,
    *flags: str,
    listen: str = "127.0.0.1:0",
    worker_listen: str = "127.0.0.1:0",
) -> AsyncIterator[SchedulerProcess]:
    """Run a scheduler with small blocks; kill it at the end if it still lives."""
    process = await start(
        *(str(model), "--listen", listen, "--worker-listen", worker_listen),
        *("--block-size", "4", *flags),
    )
    try:
        if process.stdout is None:
            raise AssertionError("no pipe")
        async with asyncio.timeout(60):
            first, second = [(await process.stdout.readline()).decode() for _ in range(2)]
        if not second:
            raise AssertionError((await process.communicate())[1].decode())
        if (first.split()[0], second.split()[0]) != ("listening", "workers"):
            raise AssertionError(f"unexpected lines {first!r} and {second!r}")
        yield SchedulerProcess(process, first.split()[1], second.split()[1])
    finally:
        if process.returncode is None:
            process.kill()
        # Of one that has ended, too: pipes with something in them stay open.
        await process.communicate()


async def is_serving(channel: aio.Channel, service: str = "") -> bool:
    check = health_pb2_grpc.HealthStub(channel).Check
    answer = await check(health_pb2.HealthCheckRequest(service=service), timeout=10)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def until_serving(channel: aio.Channel, *, serving: bool = True) -> None:
    async with asyncio.timeout(10):
        while await is_serving(channel) is not serving:
            await asyncio.sleep(0.005)


@dataclass(slots=True)
class Answer:
    """What a client got of one call."""

    tokens: list[int]
    code: grpc.StatusCode = grpc.StatusCode.OK
    details: str = ""
    cached_tokens: int = 0


async def generate(
    channel: aio.Channel,
    prompt: list[int],
    count: int,
    *,
    timeout_s: float = 60,
    **fields: str,
) -> Answer:
    """Ask for `count` tokens and return what came. `fields` are further ones of the request."""
    answer = Answer([])
    async for _ in stream(channel, prompt, count, answer, timeout_s=timeout_s, **fields):
        pass
    return answer


async def stream(
    channel: aio.Channel,
    prompt: list[int],
    count: int,
    answer: Answer,
    *,
    timeout_s: float = 60,
    **fields: str,
) -> AsyncIterator[None]:
    """Ask for `count` tokens; note what comes in `answer`, a message at a time."""
    call = inference_pb2_grpc.InferenceStub(channel).Generate(
        inference_pb2.GenerateRequest(
            token_ids=generation_pb2.TokenIds(ids=prompt),
            sampling=generation_pb2.Sampling(temperature=0),
            stopping=generation_pb2.Stopping(max_tokens=count, ignore_eos=True),
            **fields,  # type: ignore[arg-type]  # any field of text
        ),
        timeout=timeout_s,
    )
    try:
        async for message in call:
            for delta in message.deltas:
                answer.tokens += delta.token_ids
            if message.HasField("summary"):
                answer.cached_tokens = message.summary.usage.cached_tokens
            yield
    except aio.AioRpcError as error:
        answer.code, answer.details = error.code(), error.details() or ""
