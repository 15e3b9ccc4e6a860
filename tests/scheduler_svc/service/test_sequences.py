"""One stream carries several sequences: each with its own text and end, and one account."""

from collections import defaultdict
from collections.abc import AsyncIterator, Sequence

import grpc
import pytest

from front_end_loopback import EOS, Loopback, loopback
from grpc_answers import eventually, refusal_of
from pagemill.v1.generation_pb2 import (
    FINISH_REASON_ABORT,
    FINISH_REASON_ERROR,
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    BeamSearch,
    Sampling,
    Stopping,
)
from pagemill.v1.inference_pb2 import Finished, GenerateRequest, GenerateResponse, OutputOptions
from scheduler_svc.service.engine_door import Submission


@pytest.fixture
async def served() -> AsyncIterator[Loopback]:
    async with loopback() as served:
        yield served


def say(served: Loopback, *outputs: bytes | tuple[int, ...]) -> None:
    """Answer with these ids, those of sequence 0 first, each with an end of sequence behind it."""

    def script(output: bytes | tuple[int, ...]) -> object:
        return lambda _submission: (*output, EOS)

    served.door.script, *more = map(script, outputs)  # type: ignore[assignment]  # they are scripts
    served.door.more_scripts = tuple(more)  # type: ignore[arg-type]  # they are scripts


async def generate(served: Loopback, request: GenerateRequest) -> list[GenerateResponse]:
    return [response async for response in served.inference.Generate(request, timeout=30)]


def texts(responses: Sequence[GenerateResponse]) -> dict[int, str]:
    joined: dict[int, str] = defaultdict(str)
    for response in responses:
        for delta in response.deltas:
            joined[delta.sequence_index] += delta.text
    return dict(joined)


def ends(responses: Sequence[GenerateResponse]) -> dict[int, Finished]:
    """Return how each sequence ended, which each says once, and gains nothing more."""
    found: dict[int, Finished] = {}
    for response in responses:
        assert not {delta.sequence_index for delta in response.deltas} & found.keys()
        for finished in response.finished:
            assert finished.sequence_index not in found
            found[finished.sequence_index] = finished
    return found


def asking(n: int, **stopping: object) -> GenerateRequest:
    return GenerateRequest(
        text="ab",
        sampling=Sampling(n=n),
        stopping=Stopping(**stopping),  # type: ignore[arg-type]  # the fields are the test's
    )


@pytest.mark.parametrize("batch_size", [1, 2, 64])
async def test_each_sequence_has_its_own_text_and_end(served: Loopback, batch_size: int) -> None:
    served.door.batch_size = batch_size
    served.door.num_cached_tokens = 1
    # Characters of several bytes, which would be torn if sequences shared a detokenizer.
    say(served, "é😀x".encode(), b"", "😀".encode())
    first, *rest = await generate(served, asking(3, max_tokens=6))
    assert first.accepted.prompt_tokens == 2
    assert texts(rest) == {0: "é😀", 1: "", 2: "😀"}
    reasons = {index: finished.reason for index, finished in ends(rest).items()}
    assert reasons == {0: FINISH_REASON_LENGTH, 1: FINISH_REASON_STOP, 2: FINISH_REASON_STOP}
    usage = rest[-1].summary.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (2, 6 + 1 + 5, 1)
    assert not any(response.HasField("summary") for response in rest[:-1])


async def test_a_sequence_that_ends_early_is_told_of_while_the_others_go_on(
    served: Loopback,
) -> None:
    say(served, b"abcdef", b"x")
    _, *rest = await generate(served, asking(2))
    (place,) = [
        number
        for number, response in enumerate(rest)
        if [finished.sequence_index for finished in response.finished] == [1]
    ]
    assert texts(rest[: place + 1]) == {0: "ab", 1: "x"}
    assert not rest[place].HasField("summary")
    assert texts(rest[place + 1 :]) == {0: "cdef"}


@pytest.mark.parametrize("batch_size", [1, 3])
async def test_a_stop_string_ends_its_sequence_alone(served: Loopback, batch_size: int) -> None:
    served.door.batch_size = batch_size
    say(served, b"a.bcd", b"efghi", b"jk.l")
    responses = await generate(served, asking(3, stop=["."]))
    assert texts(responses) == {0: "a", 1: "efghi", 2: "jk"}
    found = ends(responses)
    assert [found[index].stop_string for index in range(3)] == [".", "", "."]
    assert {finished.reason for finished in found.values()} == {FINISH_REASON_STOP}
    assert responses[-1].summary.usage.completion_tokens == 2 + 6 + 3
    assert sorted(served.door.cuts) == [2, 3]


async def test_one_stop_string_in_all_sequences_ends_the_call_at_once(served: Loopback) -> None:
    served.door.batch_size = 8
    say(served, b"a.b" * 10)
    responses = await generate(served, asking(2, stop=["."]))
    assert texts(responses) == {0: "a", 1: "a"}
    assert len(responses) == 2


async def test_with_ids_alone_the_sequences_can_be_told_apart(served: Loopback) -> None:
    say(served, b"ab", b"c")
    request = asking(2)
    request.output.CopyFrom(OutputOptions(omit_text=True))
    responses = await generate(served, request)
    assert set(texts(responses).values()) == {""}
    ids: dict[int, list[int]] = defaultdict(list)
    for response in responses:
        for delta in response.deltas:
            ids[delta.sequence_index] += delta.token_ids
    assert ids == {0: [*b"ab", EOS], 1: [*b"c", EOS]}


async def test_one_sequence_may_fail_and_the_others_end_well(served: Loopback) -> None:
    say(served, b"ab")
    served.door.more_scripts = (lambda _submission: b"x",)
    found = ends(await generate(served, asking(2)))
    assert (found[0].reason, found[0].error) == (FINISH_REASON_STOP, "")
    assert (found[1].reason, found[1].error) == (FINISH_REASON_ERROR, "the script is over")


async def test_an_abort_ends_the_sequences_that_are_left(served: Loopback) -> None:
    say(served, b"", b"abcdefghijklmnopqrstuvwxyz", b"abcdefghijklmnopqrstuvwxyz")
    served.door.step_s = 0.01
    request = asking(3)
    request.request_id = "r1"
    stream = aiter(served.inference.Generate(request))
    responses = [await anext(stream), await anext(stream)]
    served.door.abort("", ["r1"])
    responses += [response async for response in stream]
    reasons = [finished.reason for _, finished in sorted(ends(responses).items())]
    assert reasons == [FINISH_REASON_STOP, FINISH_REASON_ABORT, FINISH_REASON_ABORT]
    assert responses[-1].HasField("summary")


async def test_a_cancelled_call_leaves_the_engine_with_all_its_sequences(served: Loopback) -> None:
    served.door.step_s = 0.01
    call = served.inference.Generate(asking(4))
    await call.read()
    await call.read()
    call.cancel()
    await eventually(lambda: not served.door.live, within_s=1.0)


async def test_hypotheses_come_whole_with_their_scores_the_best_first(served: Loopback) -> None:
    say(served, "né".encode(), b"mo")

    def by_length(submission: Submission) -> bytes:
        assert submission.beam is not None
        return b"zzzz"

    served.door.more_scripts = (*served.door.more_scripts, by_length)
    request = GenerateRequest(
        text="ab",
        beam=BeamSearch(width=4, num_returned=3),
        stopping=Stopping(max_tokens=4),
    )
    _, response = await generate(served, request)
    assert texts([response]) == {0: "né", 1: "mo", 2: "zzzz"}
    assert [finished.sequence_index for finished in response.finished] == [0, 1, 2]
    reasons = [finished.reason for finished in response.finished]
    assert reasons == [FINISH_REASON_STOP, FINISH_REASON_STOP, FINISH_REASON_LENGTH]
    assert [finished.score for finished in response.finished] == [-0.5, -1.5, -2.5]
    assert [f.cumulative_logprob for f in response.finished] == [-2.0, -3.0, -4.0]
    assert response.summary.usage.completion_tokens == 4 + 3 + 4


async def test_without_beams_no_sequence_has_a_score(served: Loopback) -> None:
    (finished,) = ends(await generate(served, asking(1, max_tokens=1))).values()
    assert not finished.HasField("score")
    assert not finished.HasField("cumulative_logprob")


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (asking(9), "sampling.n is 9, must be at most 8"),
        (GenerateRequest(text="x", beam=BeamSearch(width=9)), "beam.width is 9, must be at most 8"),
        (
            GenerateRequest(text="x", beam=BeamSearch(width=2), stopping=Stopping(stop=["."])),
            "stopping.stop has no meaning in beam search",
        ),
    ],
)
async def test_what_no_step_can_hold_is_an_invalid_argument(
    served: Loopback, request_: GenerateRequest, words: str
) -> None:
    error = await refusal_of(served.inference.Generate(request_))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert words in (error.details() or "")
    assert not served.door.submissions
