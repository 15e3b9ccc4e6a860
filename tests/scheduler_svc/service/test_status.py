"""Whatever is wrong with a call, it ends with its status, a sentence and details; others go on."""

import re
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc import aio
from grpc_status import rpc_status

from front_end_loopback import Loopback, loopback
from grpc_answers import eventually, ids_of, refusal_of
from pagemill.v1.generation_pb2 import Sampling, Stopping, TokenIds
from pagemill.v1.inference_pb2 import (
    Chat,
    ChatMessage,
    DetokenizeRequest,
    GenerateRequest,
    TokenizeRequest,
)
from scheduler_svc.core import errors

GENERATE = "/pagemill.v1.Inference/Generate"
LETTERS = GenerateRequest(text="ab", stopping=Stopping(max_tokens=5))


@pytest.fixture
async def served() -> AsyncIterator[Loopback]:
    async with loopback() as served:
        yield served


def details_of(error: aio.AioRpcError) -> dict[str, object]:
    """Return the details of a status, by the name of their type."""
    status = rpc_status.from_call(error)
    assert status is not None
    found: dict[str, object] = {}
    for kind in (
        error_details_pb2.ErrorInfo,
        error_details_pb2.BadRequest,
        error_details_pb2.RetryInfo,
    ):
        for detail in status.details:
            message = kind()
            if detail.Unpack(message):
                found[kind.DESCRIPTOR.name] = message
    return found


REFUSALS = [
    (errors.InvalidRequestError("stopping", "why"), grpc.StatusCode.INVALID_ARGUMENT),
    (errors.NeverFitsError("prompt", "why"), grpc.StatusCode.INVALID_ARGUMENT),
    (errors.DuplicateRequestError("why"), grpc.StatusCode.ALREADY_EXISTS),
    (errors.QueueFullError("why", 2.5), grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.SlowReaderError("why"), grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.UnknownModelError("why"), grpc.StatusCode.NOT_FOUND),
    (errors.NotServedError("beam", "why"), grpc.StatusCode.UNIMPLEMENTED),
    (errors.UnavailableError("why", 2.5), grpc.StatusCode.UNAVAILABLE),
    (errors.DeadlineError("why"), grpc.StatusCode.DEADLINE_EXCEEDED),
    (errors.RequestError("why"), grpc.StatusCode.FAILED_PRECONDITION),
]


@pytest.mark.parametrize("in_the_stream", [False, True])
@pytest.mark.parametrize(("error", "code"), REFUSALS, ids=[type(e).__name__ for e, _ in REFUSALS])
async def test_each_kind_of_error_has_its_status_and_details(
    served: Loopback, error: errors.RequestError, code: grpc.StatusCode, in_the_stream: bool
) -> None:
    if in_the_stream:
        served.door.error = error
    else:
        served.door.refuse = error
    refused = await refusal_of(served.inference.Generate(LETTERS))
    assert refused.code() is code
    assert refused.details() == "why"
    details = details_of(refused)
    assert isinstance(info := details["ErrorInfo"], error_details_pb2.ErrorInfo)
    assert (info.domain, bool(info.reason)) == ("pagemill", True)
    if isinstance(error, errors.InvalidRequestError):
        assert isinstance(bad := details["BadRequest"], error_details_pb2.BadRequest)
        assert [violation.field for violation in bad.field_violations] == [error.field]
    if code in {grpc.StatusCode.UNAVAILABLE} or isinstance(error, errors.QueueFullError):
        assert isinstance(retry := details["RetryInfo"], error_details_pb2.RetryInfo)
        assert retry.retry_delay.ToTimedelta().total_seconds() == 2.5
    await eventually(lambda: not served.door.live)


def with_bytes(request: GenerateRequest, mark: str = "@@") -> bytes:
    """Return the message with bytes that are no UTF-8 where the mark is."""
    return request.SerializeToString().replace(mark.encode(), b"\xff\xfe")


BAD_BYTES = [
    (with_bytes(GenerateRequest(text="@@")), "text"),
    (with_bytes(GenerateRequest(text="x", request_id="@@")), "request_id"),
    (
        with_bytes(
            GenerateRequest(
                text="x",
                sampling=Sampling(logit_bias={1: 2.0}),
                stopping=Stopping(stop=["a", "@@"]),
            )
        ),
        "stopping.stop[1]",
    ),
    (
        with_bytes(GenerateRequest(chat=Chat(messages=[ChatMessage(role="user", content="@@")]))),
        "chat.messages[0].content",
    ),
    (b"\x0a\xff", ""),
    (b"\x80\x04]q\x00.", ""),
]


async def test_bad_input_is_refused_by_name_while_others_are_served(served: Loopback) -> None:
    served.door.step_s = 0.001
    background = served.inference.Generate(
        GenerateRequest(text="a", stopping=Stopping(max_tokens=60))
    )
    raw: aio.UnaryUnaryMultiCallable[bytes, bytes] = served.channel.unary_unary(GENERATE)
    for data, field in BAD_BYTES:
        error = await refusal_of(raw(data))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert field in (error.details() or "")
        assert isinstance(bad := details_of(error)["BadRequest"], error_details_pb2.BadRequest)
        assert bad.field_violations[0].field == field
    bad_requests = [
        (GenerateRequest(text="x", sampling=Sampling(temperature=-1)), "sampling.temperature"),
        (GenerateRequest(token_ids=TokenIds(ids=[272])), "token_ids"),
        (GenerateRequest(token_ids=TokenIds(ids=[1] * 5_000_000)), "token_ids"),
        (GenerateRequest(text="x" * 10_000_000), "text"),
        (GenerateRequest(text="x", stopping=Stopping(stop=[""])), "stopping.stop"),
    ]
    for request, field in bad_requests:
        error = await refusal_of(served.inference.Generate(request))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert field in (error.details() or "")
    assert len(served.door.submissions) == 1
    expected = [ord("a") + number % 26 for number in range(1, 61)]
    assert ids_of([response async for response in background]) == expected


async def test_a_text_of_ten_megabytes_is_refused_without_tokenizing(served: Loopback) -> None:
    error = await refusal_of(served.inference.Generate(GenerateRequest(text="x" * 10_000_000)))
    # Whoever had counted its tokens would not say "at least".
    assert re.search(r"has at least \d+ tokens, must have fewer than 64", error.details() or "")


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda s: s.inference.Tokenize(TokenizeRequest()), "input"),
        (lambda s: s.inference.Tokenize(TokenizeRequest(text="x" * 10_000_000)), "text"),
        (lambda s: s.inference.Detokenize(DetokenizeRequest(token_ids=[272])), "token_ids"),
        (lambda s: s.inference.Detokenize(DetokenizeRequest(token_ids=[1] * 65)), "token_ids"),
    ],
)
async def test_texts_and_ids_out_of_bounds_are_refused(
    served: Loopback, call: Callable[[Loopback], Awaitable[object]], field: str
) -> None:
    error = await refusal_of(call(served))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (error.details() or "").startswith(field)


async def test_unknown_models_are_not_found(served: Loopback) -> None:
    for call in (
        served.inference.Generate(GenerateRequest(model="gpt", text="x")),
        served.inference.Tokenize(TokenizeRequest(model="gpt", text="x")),
        served.inference.Detokenize(DetokenizeRequest(model="gpt")),
    ):
        error = await refusal_of(call)
        assert error.code() is grpc.StatusCode.NOT_FOUND
        assert "'gpt'" in (error.details() or "")
