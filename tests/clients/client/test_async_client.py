"""A generation is a stream of typed events that ends with its reader; unborn ones are retried."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc
import pytest
from google.rpc import error_details_pb2

from pagemill.client import (
    Accepted,
    AdapterInfo,
    AlreadyExistsError,
    AsyncClient,
    CallCancelledError,
    DeadlineExceededError,
    Delta,
    Finished,
    FinishReason,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    PagemillError,
    PermissionDeniedError,
    Pin,
    ResourceExhaustedError,
    RetryPolicy,
    Summary,
    Timing,
    UnauthenticatedError,
    UnavailableError,
    UnimplementedError,
    Usage,
)
from scripted_server import (
    HELLO,
    ScriptedServer,
    accepted,
    delta,
    ended,
    fails,
    forever,
    retry_info,
    says,
    sequence_ended,
    serving,
    silent,
    until,
)

QUICK = RetryPolicy(first_pause_s=0.001, max_pause_s=0.01)


@pytest.fixture
async def script() -> ScriptedServer:
    return ScriptedServer()


@pytest.fixture
async def client(script: ScriptedServer) -> AsyncIterator[AsyncClient]:
    async with serving(script) as address, AsyncClient(address, timeout=30, retry=QUICK) as client:
        yield client


async def test_events_come_typed_and_in_order(client: AsyncClient) -> None:
    events = [event async for event in client.generate(prompt="Hi")]
    assert events == [
        Accepted("r1", 3, 7),
        Delta(0, (10,), "Hel", (), 5),
        Delta(0, (11,), "lo", (), 5),
        Finished(0, FinishReason.LENGTH, None, None, None, ""),
        Summary(Usage(3, 2, 0, 0), Timing(0.25, 0.5, 1.5, 0), ()),
    ]


async def test_sequences_that_grow_side_by_side_come_apart(
    client: AsyncClient, script: ScriptedServer
) -> None:
    script.plays = [
        says(
            accepted(),
            delta("a", [1], 1),
            delta("b", [2], 0),
            sequence_ended(1, score=-0.5, cumulative_logprob=-2.0),
            delta("c", [3], 0),
            ended(3),
        )
    ]
    completion = await client.complete(prompt="Hi", n=2)
    assert script.requests[0].sampling.n == 2
    assert [sequence.text for sequence in completion.sequences] == ["bc", "a"]
    assert [sequence.token_ids for sequence in completion.sequences] == [(2, 3), (1,)]
    first, second = (sequence.finished for sequence in completion.sequences)
    assert (first.reason, first.score, first.cumulative_logprob) == ("length", None, None)
    assert (second.reason, second.score, second.cumulative_logprob) == ("stop", -0.5, -2.0)


async def test_complete_adds_the_events_up(client: AsyncClient) -> None:
    completion = await client.complete(prompt=[1, 2, 3], max_tokens=2)
    assert (completion.text, completion.token_ids) == ("Hello", (10, 11))
    assert completion.finish_reason == "length"
    assert completion.usage.prompt_tokens == 3
    assert completion.timing.ttft_s == 0.5


async def test_a_stream_without_a_summary_is_the_servers_fault(
    client: AsyncClient, script: ScriptedServer
) -> None:
    script.plays = [says(accepted())]
    with pytest.raises(InternalError):
        await client.complete(prompt="Hi")


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidArgumentError),
        (grpc.StatusCode.OUT_OF_RANGE, InvalidArgumentError),
        (grpc.StatusCode.NOT_FOUND, NotFoundError),
        (grpc.StatusCode.ALREADY_EXISTS, AlreadyExistsError),
        (grpc.StatusCode.UNIMPLEMENTED, UnimplementedError),
        (grpc.StatusCode.UNAUTHENTICATED, UnauthenticatedError),
        (grpc.StatusCode.PERMISSION_DENIED, PermissionDeniedError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, ResourceExhaustedError),
        (grpc.StatusCode.UNAVAILABLE, UnavailableError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineExceededError),
        (grpc.StatusCode.CANCELLED, CallCancelledError),
        (grpc.StatusCode.INTERNAL, InternalError),
        (grpc.StatusCode.UNKNOWN, InternalError),
        (grpc.StatusCode.DATA_LOSS, InternalError),
    ],
)
async def test_each_status_has_its_exception(
    client: AsyncClient, script: ScriptedServer, code: grpc.StatusCode, kind: type[PagemillError]
) -> None:
    script.plays = [fails(code, "the reason")]
    with pytest.raises(PagemillError, match=r"^the reason$") as caught:
        await client.complete(prompt="Hi")
    assert type(caught.value) is kind


async def test_an_error_carries_the_servers_advice(
    client: AsyncClient, script: ScriptedServer
) -> None:
    violation = error_details_pb2.BadRequest.FieldViolation(field="sampling.top_p")
    script.plays = [
        fails(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "full",
            retry_info(1.5),
            error_details_pb2.BadRequest(field_violations=[violation]),
        )
    ]
    with pytest.raises(ResourceExhaustedError) as caught:
        await client.complete(prompt="Hi")
    assert caught.value.retry_after_s == 1.5
    assert caught.value.field == "sampling.top_p"
    assert len(script.requests) == 1


async def test_a_call_that_finds_no_worker_is_tried_again(
    client: AsyncClient, script: ScriptedServer
) -> None:
    script.plays = [fails(grpc.StatusCode.UNAVAILABLE, "no worker")] * 2 + [HELLO]
    completion = await client.complete(prompt="Hi")
    assert completion.text == "Hello"
    assert len(script.requests) == 3


async def test_tries_are_bounded(client: AsyncClient, script: ScriptedServer) -> None:
    script.plays = [fails(grpc.StatusCode.UNAVAILABLE, "no worker")]
    with pytest.raises(UnavailableError):
        await client.complete(prompt="Hi")
    assert len(script.requests) == QUICK.max_attempts


async def test_a_call_that_has_answered_is_never_tried_again(
    client: AsyncClient, script: ScriptedServer
) -> None:
    script.plays = [fails(grpc.StatusCode.UNAVAILABLE, "worker lost", after=[accepted()])]
    with pytest.raises(UnavailableError, match="worker lost"):
        await client.complete(prompt="Hi")
    assert len(script.requests) == 1


@pytest.mark.parametrize("code", [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INTERNAL])
async def test_only_a_missing_server_is_tried_again(
    client: AsyncClient, script: ScriptedServer, code: grpc.StatusCode
) -> None:
    script.plays = [fails(code, "no", retry_info(0.0)), HELLO]
    with pytest.raises(PagemillError):
        await client.complete(prompt="Hi")
    assert len(script.requests) == 1


async def test_a_longer_wait_than_the_timeout_is_not_begun(
    client: AsyncClient, script: ScriptedServer
) -> None:
    script.plays = [fails(grpc.StatusCode.UNAVAILABLE, "come back tomorrow", retry_info(86400))]
    async with asyncio.timeout(5):
        with pytest.raises(UnavailableError) as caught:
            await client.complete(prompt="Hi", timeout=20)
    assert caught.value.retry_after_s == 86400


async def test_nobody_listening_is_unavailable() -> None:
    async with serving(ScriptedServer()) as address:
        pass
    async with AsyncClient(address, retry=QUICK) as client:
        with pytest.raises(UnavailableError):
            await client.health(timeout=10)


async def test_a_timeout_ends_a_silent_call(client: AsyncClient, script: ScriptedServer) -> None:
    script.plays = [silent]
    with pytest.raises(DeadlineExceededError):
        await client.complete(prompt="Hi", timeout=0.2)


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("inf"), float("nan")])
async def test_a_call_without_an_end_is_refused(client: AsyncClient, timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout is"):
        client.generate(prompt="Hi", timeout=timeout)
    with pytest.raises(ValueError, match="timeout is"):
        AsyncClient("127.0.0.1:1", timeout=timeout)


async def test_leaving_the_loop_cancels_the_call(
    client: AsyncClient, script: ScriptedServer
) -> None:
    script.plays = [forever]
    async for event in client.generate(prompt="Hi", request_id="left"):
        if isinstance(event, Delta):
            break
    await until(lambda: script.cancelled == ["left"])


async def test_closing_the_events_cancels_the_call(
    client: AsyncClient, script: ScriptedServer
) -> None:
    script.plays = [forever]
    async with aclosing(client.generate(prompt="Hi", request_id="closed")) as events:
        await anext(events)
    await until(lambda: script.cancelled == ["closed"])


async def test_cancelling_the_task_cancels_the_call(
    client: AsyncClient, script: ScriptedServer
) -> None:
    script.plays = [silent]
    task = asyncio.create_task(client.complete(prompt="Hi", request_id="gone"))
    await until(lambda: len(script.requests) == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: script.cancelled == ["gone"])


async def test_closing_the_client_ends_its_calls_with_an_error(
    client: AsyncClient, script: ScriptedServer
) -> None:
    script.plays = [silent]
    task = asyncio.create_task(client.complete(prompt="Hi"))
    await until(lambda: len(script.requests) == 1)
    await client.close()
    with pytest.raises(CallCancelledError):
        await task


async def test_a_unix_socket_is_an_address_like_any_other() -> None:
    # A socket's path has at most 107 bytes, 103 on a Mac: pytest's own folders can be longer.
    with tempfile.TemporaryDirectory(prefix="pagemill-") as folder:
        async with (
            serving(ScriptedServer(), f"unix:{folder}/socket") as address,
            AsyncClient(address) as client,
        ):
            assert (await client.complete(prompt="Hi")).text == "Hello"


async def test_an_answer_of_many_megabytes_arrives(
    client: AsyncClient, script: ScriptedServer
) -> None:
    text = "x" * (20 * 2**20)
    assert (await client.detokenize(list(text[:8].encode()))) == text[:8]
    script.plays = [says(accepted(), delta(text, [1]))]
    events = [event async for event in client.generate(prompt="Hi")]
    assert isinstance(events[1], Delta)
    assert events[1].text == text


async def test_metadata_goes_with_every_call(script: ScriptedServer) -> None:
    async with (
        serving(script) as address,
        AsyncClient(address, metadata={"authorization": "Bearer t"}) as client,
    ):
        await client.complete(prompt="Hi")
    assert script.metadata[0]["authorization"] == "Bearer t"


async def test_text_and_ids_go_both_ways(client: AsyncClient) -> None:
    assert await client.tokenize("Hi") == (72, 105)
    assert await client.tokenize(messages=[{"role": "user", "content": "Hi"}]) == (72, 105)
    assert await client.detokenize([72, 105]) == "Hi"


async def test_the_server_tells_about_itself(client: AsyncClient) -> None:
    info = await client.server_info()
    assert (info.model_names, info.groups[0].workers[0].device) == (("demo",), "cpu")
    assert (await client.model_info()).eos_token_ids == (2,)
    with pytest.raises(NotFoundError, match="no model other"):
        await client.model_info("other")
    load = await client.load()
    assert load.pinned_blocks == 3
    assert (load.running, load.total_blocks, load.recent_steps) == (1, 8, None)


async def test_requests_are_aborted_by_name_or_all_at_once(
    client: AsyncClient, script: ScriptedServer
) -> None:
    assert (await client.abort(["r1", "r2"])).aborted == ("r1", "r2")
    await client.abort_all()
    await client.abort_all(tenant=None)
    assert [message.all for message in script.aborts] == [False, True, True]
    assert [message.all_tenants for message in script.aborts] == [False, False, True]


async def test_health_says_whether_the_server_can_answer(
    client: AsyncClient, script: ScriptedServer
) -> None:
    assert await client.health()
    script.serving = False
    assert not await client.health()


async def test_calls_that_no_message_can_hold_are_refused_by_field_and_bound() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(InvalidArgumentError, match=r"token_ids has the id 2147483648, must be"):
            await client.pin([2**31], 60.0)
        with pytest.raises(InvalidArgumentError, match="request_ids is one text, must be a list"):
            await client.abort("r1")
        with pytest.raises(InvalidArgumentError, match="pin_id is 7, which cannot be sent"):
            await client.unpin(7)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentError, match="name cannot be sent"):
            await client.load_adapter("\ud800", "poet")


async def test_a_prefix_is_pinned_for_a_time_and_let_go(
    client: AsyncClient, script: ScriptedServer
) -> None:
    pin = await client.pin([7] * 40, 60.0, salt="pepper", tenant="acme", model="demo")
    assert pin == Pin("p1", 2)
    (asked,) = script.pins
    assert (len(asked.token_ids), asked.time_to_live_s) == (40, 60.0)
    assert (asked.salt, asked.tenant, asked.model) == ("pepper", "acme", "demo")
    await client.unpin(pin.pin_id)
    with pytest.raises(NotFoundError, match="no such pin"):
        await client.unpin("p2")


async def test_adapters_are_loaded_listed_and_unloaded(
    client: AsyncClient, script: ScriptedServer
) -> None:
    assert await client.load_adapter("poet", "poets/one") == 0xABC
    assert script.adapters == {"poet": "poets/one"}
    assert await client.adapters() == (AdapterInfo("poet", 0xABC),)
    await client.unload_adapter("poet")
    with pytest.raises(NotFoundError, match="no such adapter"):
        await client.unload_adapter("poet")
