"""Adapters over the whole product: cases B-04, I-05 and J-05, and what else they promise."""

import asyncio
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest

import transformers_oracle as oracle
from cases.stack import Stack, held, serving, until
from grpc_answers import deadlines
from pagemill.client import (
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    PagemillError,
    ResourceExhaustedError,
    RetryPolicy,
    UnavailableError,
)
from pagemill.client.async_client import AsyncClient
from pagemill.client.events import Delta
from tiny_adapter import write_adapter, write_merged
from tiny_llama import write_tiny_llama

PROMPT = list(range(20, 36))
Tokens = Callable[[str, int], list[int]]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of adapters: a, b, and one that is damaged."""
    root = tmp_path_factory.mktemp("adapters")
    write_adapter(root / "a", seed=1)
    write_adapter(root / "b", seed=2, rank=7, alpha=3.0, modules=("q_proj", "v_proj"))
    (write_adapter(root / "damaged") / "adapter_model.safetensors").write_bytes(b"\x80\x04]")
    return root


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def reference(home: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    """What transformers gives over the merged weights; under no name, over the model's own."""
    root = tmp_path_factory.mktemp("merged")
    models = {"": oracle.load_directory(model)}
    for name in ("a", "b"):
        models[name] = oracle.load_directory(write_merged(root / name, home / name))
    return lambda name, count: oracle.greedy(models[name], PROMPT, count)


async def send(stack: Stack, adapter: str = "", count: int = 8) -> tuple[int, list[int]]:
    """Return cached tokens and the output."""
    reply = await stack.client.complete(
        prompt=PROMPT, temperature=0, max_tokens=count, ignore_eos=True, adapter=adapter
    )
    return reply.usage.cached_tokens, list(reply.token_ids)


@contextmanager
def slowed(stack: Stack) -> Iterator[None]:
    """Let each step take 0.1 s while the block lasts."""
    host = stack.workers[-1].host
    host.step_s = 0.1
    yield
    host.step_s = 0.0


async def test_case_B_04_an_adapter_that_is_replaced_leaves_nothing_behind(
    model: Path, home: Path, reference: Tokens
) -> None:
    a, b = reference("a", 8), reference("b", 8)
    async with serving(model, adapter_dir=home) as stack:
        first = await stack.client.load_adapter("tenant", "a")
        assert [await send(stack, "tenant") for _ in range(2)] == [(0, a), (12, a)]
        second = await stack.client.load_adapter("tenant", "b")
        assert second != first
        assert [await send(stack, "tenant") for _ in range(2)] == [(0, b), (12, b)]
        # The generation is the content's: what was cached under it may be hit again.
        assert await stack.client.load_adapter("tenant", "a") == first
        assert await send(stack, "tenant") == (12, a)
        assert await send(stack) == (0, reference("", 8))
        await stack.idle()


async def test_case_B_04_a_request_ends_with_what_it_began_with(
    model: Path, home: Path, reference: Tokens
) -> None:
    async with serving(model, adapter_dir=home) as stack:
        await stack.client.load_adapter("tenant", "a")
        with slowed(stack):
            running = asyncio.create_task(send(stack, "tenant", 40))
            await until(lambda: stack.scheduler.num_running == 1)
            await stack.client.load_adapter("tenant", "b")
            other = asyncio.create_task(send(stack, "tenant", 24))
            await until(lambda: stack.engine.num_live == 2)
        assert await running == (0, reference("a", 40))
        assert await other == (0, reference("b", 24))
        assert await send(stack, "tenant") == (12, reference("b", 8))
        adapters = stack.workers[-1].host.adapters
        await until(lambda: [bool(adapters.generation(slot)) for slot in (1, 2)] == [False, True])
        await stack.idle()


async def test_rows_of_one_batch_have_their_own(model: Path, home: Path, reference: Tokens) -> None:
    # Few blocks, so that some are preempted and come back.
    async with serving(model, adapter_dir=home, num_blocks=24) as stack:
        for name in ("a", "b"):
            await stack.client.load_adapter(name, name)
        names = ["a", "", "b", "a", "b", ""]
        with held(stack):
            tasks = [asyncio.create_task(send(stack, name, 20)) for name in names]
            await until(lambda: stack.engine.num_live == 6)
        outputs = [await task for task in tasks]
        assert [tokens for _, tokens in outputs] == [reference(name, 20) for name in names]
        assert any(len(step) >= 3 for step in stack.steps)
        load = await stack.idle()
        assert load.totals.preemptions > 0


async def test_sequences_and_beams_of_a_request_share_its_adapter(
    model: Path, home: Path, reference: Tokens
) -> None:
    async with serving(model, adapter_dir=home) as stack:
        await stack.client.load_adapter("a", "a")
        reply = await stack.client.complete(
            prompt=PROMPT, temperature=0, n=3, max_tokens=8, ignore_eos=True, adapter="a"
        )
        assert [list(each.token_ids) for each in reply.sequences] == [reference("a", 8)] * 3


async def test_an_adapter_in_use_is_unloaded_when_its_requests_have_ended(
    model: Path, home: Path, reference: Tokens
) -> None:
    async with serving(model, adapter_dir=home) as stack:
        client = stack.client
        await client.load_adapter("a", "a")
        with slowed(stack):
            running = asyncio.create_task(send(stack, "a", 40))
            await until(lambda: stack.scheduler.num_running == 1)
            for timeout_s in deadlines(0.2, lambda: not stack.engine.adapters.loaded()):
                with pytest.raises(DeadlineExceededError):
                    await client.unload_adapter("a", timeout=timeout_s)
            assert await client.adapters() == ()
            with pytest.raises(NotFoundError, match=r"adapter 'a' is not loaded; loaded: none"):
                await send(stack, "a")
            # The name is free at once.
            await client.load_adapter("a", "b")
            unloading = asyncio.create_task(client.unload_adapter("a"))
            await unloading
            assert not running.done()
        assert await running == (0, reference("a", 40))
        adapters = stack.workers[-1].host.adapters
        await until(lambda: not any(adapters.generation(slot) for slot in (1, 2)))
        await stack.idle()


async def test_a_new_worker_has_the_adapters_before_it_runs_a_row(
    model: Path, home: Path, reference: Tokens
) -> None:
    async with serving(model, adapter_dir=home) as stack:
        for name in ("a", "b"):
            await stack.client.load_adapter(name, name)
        with slowed(stack):
            tasks = [asyncio.create_task(send(stack, name, 16)) for name in ("a", "b", "")]
            await until(lambda: stack.scheduler.num_running == 3)
            await stack.stop_worker()
        await stack.add_worker()
        outputs = [(await task)[1] for task in tasks]
        assert outputs == [reference(name, 16) for name in ("a", "b", "")]
        await stack.idle()


async def test_an_adapter_that_comes_back_with_no_worker_ends_its_requests_alone(
    model: Path, home: Path, tmp_path: Path, reference: Tokens
) -> None:
    root = tmp_path / "adapters"
    shutil.copytree(home, root)
    async with serving(model, adapter_dir=root) as stack:
        for name in ("a", "b"):
            await stack.client.load_adapter(name, name)
        with slowed(stack):
            tasks = [asyncio.create_task(send(stack, name, 16)) for name in ("a", "b", "")]
            await until(lambda: stack.scheduler.num_running == 3)
            await stack.stop_worker()
        write_adapter(root / "a", seed=9)
        await stack.add_worker()
        with pytest.raises(PagemillError, match=r"adapter 'a' could not be .* has changed"):
            await tasks[0]
        rest = [(await task)[1] for task in tasks[1:]]
        assert rest == [reference(name, 16) for name in ("b", "")]
        assert [each.name for each in await stack.client.adapters()] == ["b"]
        # What lies there now is loaded as any other.
        await stack.client.load_adapter("a", "a")
        assert (await send(stack, "a"))[1] != reference("a", 8)
        await stack.idle()


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("nothing", "path is 'nothing', where nothing is below adapter_dir"),
        ("damaged", "adapter_model.safetensors is damaged or cut short"),
    ],
)
async def test_a_load_that_fails_harms_nobody(
    model: Path, home: Path, reference: Tokens, path: str, reason: str
) -> None:
    async with serving(model, adapter_dir=home, max_loras=1) as stack:
        with held(stack):
            running = asyncio.create_task(send(stack))
            await until(lambda: stack.scheduler.num_running == 1)
        with pytest.raises(InvalidArgumentError, match=reason):
            await stack.client.load_adapter("a", path)
        assert await running == (0, reference("", 8))
        # Its slot is free again.
        await stack.client.load_adapter("a", "a")
        with pytest.raises(ResourceExhaustedError, match=r"1 adapters are loaded.* see max_loras"):
            await impatient(stack).load_adapter("b", "b")
        await stack.client.unload_adapter("a")
        await stack.client.load_adapter("b", "b")
        assert (await send(stack, "b"))[1] == reference("b", 8)


def impatient(stack: Stack) -> AsyncClient:
    return AsyncClient(stack.address, retry=RetryPolicy(max_attempts=1))


async def test_a_worker_without_a_directory_says_so(model: Path) -> None:
    async with serving(model) as stack:
        with pytest.raises(InvalidArgumentError, match="adapter_dir of the worker is not set"):
            await stack.client.load_adapter("a", "a")


async def test_without_a_worker_nothing_is_loaded(model: Path, home: Path) -> None:
    async with serving(model, adapter_dir=home, join=False) as stack:
        client = impatient(stack)
        with pytest.raises(UnavailableError, match="no worker is ready"):
            await client.load_adapter("a", "a")
        await client.close()


@pytest.mark.parametrize(
    "name",
    ["../evil", "a/../../evil", "/etc/x", "..", ".", "a\0b", "x" * 300, "~", "a\nERROR", "a.", ""],
)
async def test_case_J_05_no_name_becomes_a_path(shared: Stack, home: Path, name: str) -> None:
    before = sorted(home.rglob("*"))
    with pytest.raises((NotFoundError, InvalidArgumentError)):
        await send(shared, name or "\0")
    for path in (name, "../a", "a/../../a", "/etc"):
        with pytest.raises(InvalidArgumentError):
            await shared.client.load_adapter("x", path)
    assert sorted(home.rglob("*")) == before
    assert await shared.client.adapters() == ()


@pytest.fixture
async def shared(model: Path, home: Path) -> Any:
    async with serving(model, adapter_dir=home) as stack:
        yield stack


async def test_case_I_05_adapters_add_no_series(model: Path, home: Path) -> None:
    async with serving(model, adapter_dir=home) as stack:
        await send(stack)
        before = generate_latest(stack.registry).count(b"\n")
        assert stack.metric("pagemill_adapters") == 0
        for turn in range(12):
            await stack.client.load_adapter(f"adapter-{turn}", "ab"[turn % 2])
            assert stack.metric("pagemill_adapters") == 1
            with pytest.raises(NotFoundError):
                await send(stack, f"unknown-{turn}")
            await send(stack, f"adapter-{turn}", 1)
            await stack.client.unload_adapter(f"adapter-{turn}")
        page = generate_latest(stack.registry)
        assert b"adapter-" not in page
        assert b"unknown-" not in page
        assert page.count(b"\n") <= before + 5


async def test_others_decode_while_an_adapter_is_read(
    model: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(model, adapter_dir=home) as stack:
        host = stack.workers[-1].host
        read, may_read = host.adapters.read, asyncio.Event()
        loop = asyncio.get_running_loop()

        def slow(path: str) -> Any:
            asyncio.run_coroutine_threadsafe(may_read.wait(), loop).result(30)
            return read(path)

        monkeypatch.setattr(host.adapters, "read", slow)
        loading = asyncio.create_task(stack.client.load_adapter("a", "a"))
        deltas = 0
        async for event in stack.client.generate(
            prompt=PROMPT, temperature=0, max_tokens=20, ignore_eos=True
        ):
            deltas += isinstance(event, Delta)
        assert deltas > 1
        assert not loading.done()
        may_read.set()
        await loading
