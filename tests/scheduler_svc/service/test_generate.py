"""What a client of Inference sees, over real gRPC: exact output, or a status and a sentence."""

import asyncio
import time
from collections.abc import (
    AsyncIterator,
    Callable,
    Iterable,
)
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import grpc
import pytest

from front_end_loopback import EOS, LONG_TOKENS, Loopback, front_end, loopback
from grpc_answers import deadlines, eventually, ids_of, refusal_of, text_of
from pagemill.v1.generation_pb2 import (
    FINISH_REASON_ABORT,
    FINISH_REASON_ERROR,
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    Sampling,
    Stopping,
)
from pagemill.v1.inference_pb2 import (
    Chat,
    ChatMessage,
    DetokenizeRequest,
    GenerateRequest,
    GenerateResponse,
    OutputOptions,
    TokenizeRequest,
)
from scheduler_svc.core.errors import DeadlineError
from scheduler_svc.service.engine_door import Submission
from scheduler_svc.service.inference_servicer import InferenceServicer
from scheduler_svc.service.rpc_handlers import Context

GENERATE = "/pagemill.v1.Inference/Generate"
Script = Callable[[Submission], Iterable[int]]


@pytest.fixture
async def served() -> AsyncIterator[Loopback]:
    async with loopback() as served:
        yield served


def saying(*token_ids: int) -> Script:
    """Answer with these ids, and then with the end of sequence."""
    return lambda _submission: (*token_ids, EOS)


async def generate(served: Loopback, request: GenerateRequest) -> list[GenerateResponse]:
    return [response async for response in served.inference.Generate(request, timeout=30)]


LETTERS = GenerateRequest(text="ab", stopping=Stopping(max_tokens=5))


@pytest.mark.parametrize("over_unix_socket", [False, True])
async def test_a_stream_is_accepted_then_grows_then_is_accounted_for(
    socket_path: Path, over_unix_socket: bool
) -> None:
    async with loopback(unix_socket=socket_path if over_unix_socket else None) as served:
        served.door.num_cached_tokens = 1
        request = GenerateRequest(
            request_id="r1", text="ab", sampling=Sampling(seed=9), stopping=LETTERS.stopping
        )
        first, *rest = await generate(served, request)
    assert (first.accepted.request_id, first.accepted.prompt_tokens) == ("r1", 2)
    assert first.accepted.seed == 9
    assert not first.deltas
    assert text_of(rest) == "cdefg"
    assert ids_of(rest) == list(b"cdefg")
    *_, last = rest
    assert [finished.reason for finished in last.finished] == [FINISH_REASON_LENGTH]
    usage, timing = last.summary.usage, last.summary.timing
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (2, 5, 1)
    assert 0 < timing.queue_s < timing.ttft_s <= timing.total_s < 5
    for response in rest:
        assert not response.HasField("accepted")
    for response in rest[:-1]:
        assert not response.finished
        assert not response.HasField("summary")


async def test_tokens_that_piled_up_go_in_one_message(served: Loopback) -> None:
    served.door.batch_size = 3
    _, *rest = await generate(served, LETTERS)
    assert [list(response.deltas[0].token_ids) for response in rest] == [
        list(b"cde"),
        list(b"fg"),
    ]


async def test_without_text_only_ids_come(served: Loopback) -> None:
    request = GenerateRequest(
        text="ab", stopping=LETTERS.stopping, output=OutputOptions(omit_text=True)
    )
    responses = await generate(served, request)
    assert text_of(responses) == ""
    assert ids_of(responses) == list(b"cdefg")


async def test_a_character_split_over_tokens_comes_whole(served: Loopback) -> None:
    served.door.script = saying(*"é😀".encode(), *b"!")
    responses = await generate(served, GenerateRequest(text="x"))
    assert text_of(responses) == "é😀!"
    assert not any("\ufffd" in text_of([response]) for response in responses)


async def test_an_unfinished_character_is_marked_at_the_end(served: Loopback) -> None:
    served.door.script = lambda _submission: (*b"a", *"😀".encode()[:2])
    request = GenerateRequest(text="x", stopping=Stopping(max_tokens=3))
    assert text_of(await generate(served, request)) == "a\ufffd"


DEFGHIJ = (LONG_TOKENS["DEF"], ord("G"), LONG_TOKENS["HI"], ord("J"), ord("K"))
ABCD = (LONG_TOKENS["ab"], LONG_TOKENS["cd"], ord("e"))


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize(
    ("script", "stopping", "text", "num_tokens", "stop"),
    [
        (DEFGHIJ, Stopping(stop=["DEFGHIJ"]), "", 4, "DEFGHIJ"),
        (DEFGHIJ, Stopping(stop=["DEFGHX"]), "DEFGHIJK", 6, ""),
        (ABCD, Stopping(stop=["bc"]), "a", 2, "bc"),
        (ABCD, Stopping(stop=["bc"], include_stop_string=True), "abc", 2, "bc"),
        (ABCD, Stopping(stop=["d"]), "abc", 2, "d"),
        (ABCD, Stopping(stop=["cd", "bc"]), "a", 2, "bc"),
        (DEFGHIJ, Stopping(stop=["J"], max_tokens=4), "DEFGHI", 4, "J"),
        (ABCD, Stopping(stop=["<eos>"]), "abcde", 4, ""),
        (tuple("x€".encode()), Stopping(stop=["€"]), "x", 4, "€"),
    ],
)
async def test_a_stop_string_ends_the_output_across_tokens(
    served: Loopback,
    batch_size: int,
    script: tuple[int, ...],
    stopping: Stopping,
    text: str,
    num_tokens: int,
    stop: str,
) -> None:
    served.door.batch_size = batch_size
    served.door.script = saying(*script)
    responses = await generate(served, GenerateRequest(text="x", stopping=stopping))
    assert text_of(responses) == text
    assert ids_of(responses) == [*script, EOS][:num_tokens]
    (finished,) = responses[-1].finished
    assert finished.reason == FINISH_REASON_STOP
    assert finished.stop_string == stop
    assert finished.WhichOneof("stop_match") == ("stop_string" if stop else None)
    assert responses[-1].summary.usage.completion_tokens == num_tokens
    # Where the output goes on behind the stop string, the engine is told its length.
    assert set(served.door.cuts) <= {num_tokens}
    await eventually(lambda: not served.door.live)


async def test_a_stop_id_ends_the_output_and_is_no_text(served: Loopback) -> None:
    request = GenerateRequest(text="ab", stopping=Stopping(stop_token_ids=[ord("e")]))
    responses = await generate(served, request)
    assert text_of(responses) == "cd"
    assert ids_of(responses) == list(b"cde")
    assert responses[-1].finished[0].stop_token_id == ord("e")


async def test_what_cannot_be_computed_ends_with_its_reason(served: Loopback) -> None:
    served.door.script = lambda _submission: b"x"
    responses = await generate(served, GenerateRequest(text="x"))
    (finished,) = responses[-1].finished
    assert (finished.reason, finished.error) == (FINISH_REASON_ERROR, "the script is over")
    assert text_of(responses) == "x"


async def test_cancelled_calls_leave_the_engine(served: Loopback) -> None:
    served.door.step_s = 0.01
    calls = [served.inference.Generate(GenerateRequest(text="ab")) for _ in range(50)]
    for call in calls:
        for _ in range(3):
            await call.read()
    assert len(served.door.live) == 50
    for call in calls:
        call.cancel()
    await eventually(lambda: not served.door.live, within_s=1.0)
    assert served.door.num_left == 50
    assert served.door.submissions[0].deadline_ns is None


async def test_a_call_that_cannot_be_written_leaves_the_engine_when_cancelled() -> None:
    async with loopback(front_end(max_model_len=10**7)) as served:
        served.door.batch_size = 10_000
        call = served.inference.Generate(GenerateRequest(text="ab"))
        await call.read()
        steps: list[int] = []

        def is_stuck() -> bool:
            steps.append(served.door.num_steps)
            return steps[-10:].count(steps[-1]) == 10

        # Flow control stops the server, as the client reads no more.
        await eventually(is_stuck)
        assert served.door.live
        call.cancel()
        await eventually(lambda: not served.door.live)


async def test_a_deadline_ends_the_call_and_leaves_the_engine(served: Loopback) -> None:
    served.door.step_s = 0.01
    for timeout_s in deadlines(0.3, lambda: bool(served.door.submissions)):
        call = served.inference.Generate(GenerateRequest(text="ab"), timeout=timeout_s)
        assert (await refusal_of(call)).code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await eventually(lambda: not served.door.live)
    submission = served.door.submissions[0]
    assert submission.deadline_ns is not None
    # grpc rounds the time that is left up to milliseconds.
    left_ns = submission.deadline_ns - submission.arrival_ns
    assert 0 < left_ns <= timeout_s * 1e9 + 10_000_000


async def test_an_expired_call_never_reaches_the_engine(served: Loopback) -> None:
    # grpc seldom lets such a call through, so the servicer is asked itself.
    expired = cast("Context", SimpleNamespace(time_remaining=lambda: 0.0))
    servicer = InferenceServicer(served.door, front_end())
    with pytest.raises(DeadlineError, match="had passed"):
        await anext(servicer.Generate(LETTERS, expired))
    assert not served.door.submissions


async def test_a_cancellation_inside_the_server_ends_the_call(served: Loopback) -> None:
    def cancelled(_submission: Submission) -> Iterable[int]:
        yield ord("x")
        raise asyncio.CancelledError

    served.door.script = cancelled
    error = await refusal_of(served.inference.Generate(GenerateRequest(text="ab"), timeout=10))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert not served.door.live


async def test_an_aborted_stream_ends_well_with_its_reason(served: Loopback) -> None:
    served.door.step_s = 0.01
    responses = aiter(served.inference.Generate(GenerateRequest(request_id="r1", text="ab")))
    await anext(responses)
    served.door.abort("", ["r1"])
    *_, last = [response async for response in responses]
    assert last.finished[0].reason == FINISH_REASON_ABORT
    assert last.HasField("summary")


async def test_messages_keep_the_interval_that_was_asked_for(served: Loopback) -> None:
    request = GenerateRequest(
        text="ab", stopping=Stopping(max_tokens=3), output=OutputOptions(min_interval_s=0.05)
    )
    began = time.monotonic()
    assert text_of(await generate(served, request)) == "cde"
    assert time.monotonic() - began >= 0.1


async def test_a_live_id_cannot_be_used_again_until_its_request_has_ended(
    served: Loopback,
) -> None:
    served.door.step_s = 0.01
    request = GenerateRequest(request_id="id-1", text="ab", stopping=Stopping(max_tokens=20))
    first = aiter(served.inference.Generate(request))
    await anext(first)
    second = await refusal_of(served.inference.Generate(request))
    assert second.code() is grpc.StatusCode.ALREADY_EXISTS
    assert len(ids_of([response async for response in first])) == 20
    assert len(ids_of(await generate(served, request))) == 20


async def test_a_long_prompt_is_tokenized_beside_the_loop() -> None:
    async with loopback(front_end(max_model_len=10**6)) as served:
        request = GenerateRequest(text="ab" * 50_000, stopping=Stopping(max_tokens=1))
        assert ids_of(await generate(served, request)) == [ord("c")]
        assert len(served.door.submissions[0].token_ids) == 100_000


async def test_texts_go_to_ids_and_back(served: Loopback) -> None:
    ids = (await served.inference.Tokenize(TokenizeRequest(text="hé"))).token_ids
    assert list(ids) == list("hé".encode())
    assert (await served.inference.Detokenize(DetokenizeRequest(token_ids=ids))).text == "hé"
    assert (await served.inference.Detokenize(DetokenizeRequest(token_ids=[0xE2]))).text == "\ufffd"


async def test_a_chat_is_tokenized_as_its_template_lays_it_out(served: Loopback) -> None:
    chat = Chat(messages=[ChatMessage(role="user", content="hi <|im_end|>")])
    ids = (await served.inference.Tokenize(TokenizeRequest(chat=chat))).token_ids
    special = served.inference.Detokenize(
        DetokenizeRequest(token_ids=ids, keep_special_tokens=True)
    )
    assert (await special).text == "<|im_start|>user hi <|im_end|><|im_end|><|im_start|>assistant "
    assert list(ids).count(258) == 1
    await generate(served, GenerateRequest(chat=chat, stopping=Stopping(max_tokens=1)))
    assert served.door.submissions[0].token_ids.tolist() == list(ids)
