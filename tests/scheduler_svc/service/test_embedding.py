"""What a client of Embed sees, over real gRPC: one vector an input, or a status and a sentence."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from engine_bench import Bench, running
from fake_door import last_ids
from front_end_loopback import VOCAB_SIZE, Loopback, front_end, loopback
from grpc_answers import eventually, refusal_of
from pagemill.v1.generation_pb2 import TokenIds
from pagemill.v1.inference_pb2 import (
    POOLING_LAST,
    POOLING_MEAN,
    EmbedRequest,
    EmbedResponse,
    EmbedTexts,
    EmbedTokens,
)
from scheduler_svc.core.errors import AbortedError, QueueFullError
from scheduler_svc.core.reports import Pooling, Reports
from scheduler_svc.core.request import FinishReason
from scheduler_svc.service.embedding import Embedder, normalized
from scheduler_svc.service.engine_door import Finish, Submission


@pytest.fixture
async def served() -> AsyncIterator[Loopback]:
    async with loopback() as served:
        yield served


def texts(*inputs: str) -> EmbedTexts:
    return EmbedTexts(texts=inputs)


def tokens(*inputs: Sequence[int]) -> EmbedTokens:
    return EmbedTokens(inputs=[TokenIds(ids=ids) for ids in inputs])


def vectors_of(response: EmbedResponse) -> list[list[float]]:
    return [np.frombuffer(each.values, dtype="<f4").tolist() for each in response.vectors]


async def test_each_input_has_its_vector_in_order(served: Loopback) -> None:
    response = await served.inference.Embed(EmbedRequest(texts=texts("ab", "c", "xyz")))
    assert vectors_of(response) == [[2, ord("b")], [1, ord("c")], [3, ord("z")]]
    assert (response.usage.prompt_tokens, response.usage.completion_tokens) == (6, 0)
    response = await served.inference.Embed(
        EmbedRequest(tokens=tokens([7], [8, 9]), normalize=True)
    )
    np.testing.assert_allclose(
        vectors_of(response), [[1 / 50**0.5, 7 / 50**0.5], [2 / 85**0.5, 9 / 85**0.5]], rtol=1e-6
    )
    await eventually(lambda: not served.door.live)


@pytest.mark.parametrize(
    ("given", "pooling", "read_cache"),
    [
        (0, Pooling.LAST, True),
        (POOLING_LAST, Pooling.LAST, True),
        (POOLING_MEAN, Pooling.MEAN, False),
    ],
)
async def test_a_mean_reads_no_cache(
    served: Loopback, given: int, pooling: Pooling, read_cache: bool
) -> None:
    await served.inference.Embed(EmbedRequest(texts=texts("ab"), pooling=given))  # type: ignore[arg-type]
    [submission] = served.door.submissions
    assert submission.reports == Reports(pooling=pooling)
    assert submission.read_cache is read_cache
    assert (submission.tenant, submission.priority, submission.max_output_tokens) == ("", 0, 1)


async def test_one_input_has_the_calls_id_and_several_have_numbers(served: Loopback) -> None:
    await served.inference.Embed(EmbedRequest(texts=texts("a"), request_id="x"))
    await served.inference.Embed(EmbedRequest(texts=texts("a", "b"), request_id="x"))
    assert [each.request_id for each in served.door.submissions] == ["x", "x#0", "x#1"]


async def test_a_long_call_leaves_room_for_others(served: Loopback) -> None:
    served.door.step_s = 0.005
    response = await served.inference.Embed(EmbedRequest(tokens=tokens(*[[1]] * 100)))
    assert len(response.vectors) == 100
    assert served.door.most_live == 32


INVALID = [
    (EmbedRequest(), "input is missing, must be one of texts, tokens"),
    (EmbedRequest(texts=texts()), "texts is empty, must have at least 1 input"),
    (EmbedRequest(tokens=tokens()), "tokens is empty, must have at least 1 input"),
    (EmbedRequest(texts=texts("a", "")), "texts[1] is empty, must have at least 1 token"),
    (EmbedRequest(tokens=tokens([1], [VOCAB_SIZE])), "tokens[1] has the id 272"),
    (EmbedRequest(tokens=tokens([1] * 64)), "tokens[0] has 64 tokens, must have fewer than 64"),
    (EmbedRequest(texts=texts("x" * 10_000)), "tokens, must have fewer than 64"),
    (EmbedRequest(texts=texts(*["a"] * 1025)), "texts has 1025 inputs, must have at most 1024"),
    (EmbedRequest(texts=texts("a"), request_id="\n"), "request_id is"),
    (EmbedRequest(texts=texts("a"), pooling=3), "pooling is 3, must be one of [0, 1, 2]"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("request_", "words"), INVALID)
async def test_a_bad_call_is_refused_before_anything_is_queued(
    served: Loopback, request_: EmbedRequest, words: str
) -> None:
    error = await refusal_of(served.inference.Embed(request_))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert words in str(error.details())
    assert not served.door.submissions


async def test_another_model_is_not_found(served: Loopback) -> None:
    error = await refusal_of(served.inference.Embed(EmbedRequest(texts=texts("a"), model="gpt")))
    assert error.code() is grpc.StatusCode.NOT_FOUND


def failing_at(number: int, finish: Finish) -> "object":
    def pool(submission: Submission) -> Finish:
        return finish if submission.request_id.endswith(f"#{number}") else last_ids(submission)

    return pool


@pytest.mark.parametrize(
    ("finish", "code", "words"),
    [
        (Finish(FinishReason.ERROR, None, "no number"), grpc.StatusCode.INTERNAL, "no number"),
        (Finish(FinishReason.ABORT, None, ""), grpc.StatusCode.ABORTED, "aborted"),
    ],
)
async def test_one_input_that_fails_ends_the_call_and_the_others(
    served: Loopback, finish: Finish, code: grpc.StatusCode, words: str
) -> None:
    served.door.pool = failing_at(3, finish)  # type: ignore[assignment]
    call = served.inference.Embed(EmbedRequest(texts=texts(*"abcdefgh")))
    error = await refusal_of(call)
    assert error.code() is code
    assert words in str(error.details())
    await eventually(lambda: not served.door.live)


async def test_a_full_queue_is_told_as_for_any_request(served: Loopback) -> None:
    served.door.refuse = QueueFullError("16 requests wait")
    error = await refusal_of(served.inference.Embed(EmbedRequest(texts=texts("a", "b"))))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("most_waiting", [1, 8])
async def test_a_call_longer_than_the_queue_is_answered(
    served: Loopback, most_waiting: int
) -> None:
    served.door.most_waiting = most_waiting
    served.door.step_s = 0.001
    response = await served.inference.Embed(EmbedRequest(tokens=tokens(*[[1]] * 40)), timeout=20)
    assert len(response.vectors) == 40
    assert served.door.most_live == most_waiting
    await eventually(lambda: not served.door.live)


async def test_a_call_that_waits_for_room_is_freed_when_it_is_cancelled(served: Loopback) -> None:
    served.door.most_waiting = 1
    served.door.step_s = 30.0
    call = served.inference.Embed(EmbedRequest(texts=texts("a", "b", "c")))
    await eventually(lambda: len(served.door.submissions) == 3)
    call.cancel()
    await eventually(lambda: not served.door.live)


async def test_a_cancelled_call_frees_what_its_inputs_hold(served: Loopback) -> None:
    served.door.step_s = 30.0
    call = served.inference.Embed(EmbedRequest(texts=texts("a", "b")))
    await eventually(lambda: len(served.door.live) == 2)
    call.cancel()
    await eventually(lambda: not served.door.live)


async def test_inputs_count_as_requests_in_the_metrics() -> None:
    registry = CollectorRegistry()
    async with loopback(front_end(registry=registry)) as served:
        await served.inference.Embed(EmbedRequest(texts=texts("a", "b")))
        ended = registry.get_sample_value(
            "pagemill_request_success_total", {"finished_reason": "stop"}
        )
        assert ended == 2


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(values=st.lists(finite, min_size=1, max_size=8))
def test_a_normalised_vector_has_length_one_or_is_zero(values: list[float]) -> None:
    vector = np.array(values, dtype=np.float32)
    made = normalized(vector)
    assert made.dtype == np.float32
    if not vector.any():
        assert not made.any()
        return
    assert np.linalg.norm(made.astype(np.float64)) == pytest.approx(1, abs=1e-3)
    assert (np.sign(made) * np.sign(vector) >= 0).all()


@pytest.mark.parametrize(
    ("ids", "aborted"),
    [(["x"], ["x"]), (["x#1", "x"], ["x#1", "x"]), (["x#0"], ["x#0"]), (None, ["x"])],
)
async def test_a_call_is_aborted_by_the_id_its_client_gave(
    ids: list[str] | None, aborted: list[str]
) -> None:
    async with running(Bench()) as bench:
        bench.group.eager = False
        embedder = Embedder(bench.door, front_end())
        request = EmbedRequest(tokens=tokens(*([number] for number in range(40))), request_id="x")
        call = asyncio.create_task(embedder.embed(request, arrival_ns=0, deadline_ns=None))
        await eventually(lambda: bench.engine.num_live == 32)
        assert bench.door.abort("other", ids) == ([], ids or [])
        assert bench.door.abort("", ids) == (aborted, [])
        async with asyncio.timeout(10):
            with pytest.raises(AbortedError):
                await call
        bench.group.answer()
        await eventually(bench.holds_nothing)


async def test_aborting_everyone_names_each_call_once() -> None:
    async with running(Bench()) as bench:
        bench.group.eager = False
        embedder = Embedder(bench.door, front_end())
        request = EmbedRequest(tokens=tokens([1], [2], [3]), request_id="x")
        call = asyncio.create_task(embedder.embed(request, arrival_ns=0, deadline_ns=None))
        await eventually(lambda: bench.engine.num_live == 3)
        assert bench.engine.abort_everyone() == ["x"]
        async with asyncio.timeout(10):
            with pytest.raises(AbortedError):
                await call
