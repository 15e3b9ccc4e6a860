"""What is sent is what arrives, in both directions; what cannot be read is refused by name."""

from contextlib import suppress
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill.v1 import worker_pb2
from scheduler_svc.core.block_hash import ContentSpan
from scheduler_svc.core.embedded_span import EmbeddedSpan
from scheduler_svc.core.reports import Pooling
from scheduler_svc.core.request import Sampling
from scheduler_svc.core.step_plan import (
    AdmittedRow,
    AppendedBlocks,
    ForkedRow,
    Int32Array,
    StepPlan,
)
from scheduler_svc.service.worker_wire import (
    Epoch,
    MalformedMessageError,
    decode_message,
    decode_result,
    encode_plan,
)
from wire_plans import decode_plan

int32 = st.integers(-(2**31), 2**31 - 1)
uint32 = st.integers(0, 2**32 - 1)
uint64 = st.integers(0, 2**64 - 1)
float32 = st.floats(width=32, allow_nan=False)
columns = st.lists(int32, max_size=20).map(lambda values: np.array(values, dtype=np.int32))
ids = st.integers(0, 2**31 - 1)
samplings = st.builds(
    Sampling,
    temperature=float32,
    top_k=uint32,
    top_p=float32,
    min_p=float32,
    seed=uint64,
    presence_penalty=float32,
    frequency_penalty=float32,
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.25]),
    logit_bias=st.dictionaries(ids, float32, max_size=3).map(lambda bias: tuple(bias.items())),
    allowed_token_ids=st.lists(ids, max_size=3).map(tuple),
    bad_words=st.lists(st.lists(ids, min_size=1, max_size=3).map(tuple), max_size=2).map(tuple),
)
# A test's vectors have 8 bytes.
spans = st.builds(
    lambda start, values: EmbeddedSpan(ContentSpan("", start, len(values) // 8), values, 2),
    uint32,
    st.integers(1, 3).flatmap(lambda count: st.binary(min_size=8 * count, max_size=8 * count)),
)
admitted_rows = st.builds(
    AdmittedRow,
    row=uint32,
    request_id=st.text(st.characters(codec="utf-8"), max_size=8),
    tokens=columns,
    num_prompt_tokens=uint32,
    num_computed_tokens=uint32,
    num_new_tokens=uint32,
    block_tables=st.lists(columns, max_size=2).map(tuple),
    sampling=samplings,
    sequence_index=uint32,
    num_samples=st.integers(1, 2**32 - 1),
    num_candidates=uint32,
    adapter=uint32,
    embeddings=st.lists(spans, max_size=2).map(tuple),
    logprobs=st.booleans(),
    prompt_logprobs=st.none() | uint32,
    pooling=st.none() | st.sampled_from(Pooling),
    min_output_tokens=uint32,
    stop_token_ids=st.frozensets(ids, max_size=3),
)
forked_rows = st.builds(
    ForkedRow,
    row=uint32,
    parent_row=uint32,
    sequence_index=uint32,
    last_token=st.none() | int32,
    num_blocks=uint32,
)
plans = st.builds(
    StepPlan,
    step_id=uint64,
    reset=st.booleans(),
    released_rows=columns,
    forked=st.lists(forked_rows, max_size=3).map(tuple),
    admitted=st.lists(admitted_rows, max_size=3).map(tuple),
    appended=st.lists(
        st.builds(AppendedBlocks, group=uint32, rows=columns, blocks=columns), max_size=2
    ).map(tuple),
    copy_sources=columns,
    copy_destinations=columns,
    exception_rows=columns,
    exception_num_computed_tokens=columns,
    exception_num_new_tokens=columns,
    num_rows=st.just(0),
    num_tokens=st.just(0),
    num_preempted=st.just(0),
    serial_rows=columns,
)


def plain(value: object) -> object:
    """Return a value whose arrays compare."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.tolist()
    if isinstance(value, tuple):
        return tuple(plain(part) for part in value)
    if isinstance(value, StepPlan | AdmittedRow | AppendedBlocks | ForkedRow | EmbeddedSpan):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    return value


@given(plan=plans, incarnation=uint64, number=uint64)
def test_a_plan_arrives_as_it_was_sent(plan: StepPlan, incarnation: int, number: int) -> None:
    raw = encode_plan(plan, Epoch(incarnation, number), "00-ab-cd-01")
    message = worker_pb2.JoinResponse.FromString(raw)
    assert message.WhichOneof("message") == "plan"
    assert plain(decode_plan(message.plan)) == plain(plan)
    assert message.plan.epoch == worker_pb2.Epoch(incarnation=incarnation, number=number)
    assert message.plan.traceparent == "00-ab-cd-01"


def test_columns_are_little_endian_whatever_the_array() -> None:
    big_endian = np.array([1, 2], dtype=">i4")
    empty: Int32Array = np.zeros(0, dtype=np.int32)
    plan = StepPlan(
        step_id=0,
        reset=False,
        released_rows=big_endian,
        forked=(),
        admitted=(),
        appended=(),
        copy_sources=empty,
        copy_destinations=empty,
        exception_rows=empty,
        exception_num_computed_tokens=empty,
        exception_num_new_tokens=empty,
        num_rows=0,
        num_tokens=0,
        num_preempted=0,
    )
    message = worker_pb2.JoinResponse.FromString(encode_plan(plan, Epoch(0, 0), ""))
    assert message.plan.released_rows == b"\1\0\0\0\2\0\0\0"


def pack(*values: int) -> bytes:
    return np.array(values, dtype="<i4").tobytes()


@given(
    tokens=st.lists(st.integers(0, 99), max_size=9),
    named=st.booleans(),
    counted=st.booleans(),
    errors=st.lists(st.tuples(uint32, st.text(st.characters(codec="utf-8"))), max_size=2),
)
def test_a_result_arrives_as_it_was_sent(
    tokens: list[int], named: bool, counted: bool, errors: list[tuple[int, str]]
) -> None:
    answer = decode_result(
        worker_pb2.StepResult(
            step_id=2**40,
            epoch=worker_pb2.Epoch(incarnation=2**63, number=3),
            tokens=pack(*tokens),
            rows=pack(*range(len(tokens))) if named else b"",
            num_tokens=pack(*[1] * len(tokens)) if counted else b"",
            errors=[worker_pb2.RowError(row=row, reason=reason) for row, reason in errors],
            timing=worker_pb2.StepTiming(wait_ns=1, execute_ns=2, codec_ns=3),
        ),
        vocab_size=100,
    )
    assert answer.epoch == Epoch(2**63, 3)
    assert answer.result.step_id == 2**40
    assert answer.result.tokens.tolist() == tokens
    assert answer.result.tokens.dtype == np.int32
    assert answer.result.row_errors == tuple(errors)
    assert (answer.timing.wait_ns, answer.timing.execute_ns, answer.timing.codec_ns) == (1, 2, 3)


def one_row(
    num_tokens: bytes = b"",
    num_candidates: bytes = b"",
    candidate_ids: bytes = b"",
    candidate_logprobs: bytes = b"",
) -> worker_pb2.StepResult:
    return worker_pb2.StepResult(
        tokens=pack(7),
        rows=pack(3),
        num_tokens=num_tokens,
        num_candidates=num_candidates,
        candidate_ids=candidate_ids,
        candidate_logprobs=candidate_logprobs,
    )


def candidates(*logprobs: float) -> worker_pb2.StepResult:
    return one_row(
        num_candidates=pack(len(logprobs)),
        candidate_ids=pack(*range(len(logprobs))),
        candidate_logprobs=np.array(logprobs, dtype="<f4").tobytes(),
    )


def floats(*values: float) -> bytes:
    return np.array(values, dtype="<f4").tobytes()


def test_what_is_told_of_tokens_prompts_and_rows_arrives() -> None:
    message = worker_pb2.StepResult(
        tokens=pack(7, 8, 9),
        rows=pack(3, 5),
        num_tokens=pack(2, 1),
        logprobs=floats(-0.5, -1.5, 0),
        ranks=pack(1, 100, 0),
        prompt_logprobs=[
            worker_pb2.PromptLogprobs(
                row=4,
                offset=2,
                logprobs=floats(-0.25, -0.75),
                ranks=pack(1, 2),
                candidate_ids=pack(9, 8, 7, 6),
                candidate_logprobs=floats(-1, -2, -3, -4),
            )
        ],
        vectors=[worker_pb2.RowVector(row=6, values=floats(0.5, -8))],
    )
    result = decode_result(message, vocab_size=100).result
    assert result.logprobs is not None
    assert result.ranks is not None
    assert result.logprobs.tolist() == [-0.5, -1.5, 0]
    assert result.ranks.tolist() == [1, 100, 0]
    [part] = result.prompt_parts
    assert (part.row, part.offset) == (4, 2)
    assert (part.logprobs.tolist(), part.ranks.tolist()) == ([-0.25, -0.75], [1, 2])
    assert part.candidate_ids.tolist() == [[9, 8], [7, 6]]
    assert part.candidate_logprobs.tolist() == [[-1, -2], [-3, -4]]
    [(row, vector)] = result.vectors
    assert (row, vector.tolist()) == (6, [0.5, -8])


def told(logprobs: bytes, ranks: bytes) -> worker_pb2.StepResult:
    return worker_pb2.StepResult(tokens=pack(7), logprobs=logprobs, ranks=ranks)


def prompt_told(**changes: object) -> worker_pb2.StepResult:
    fields = {"offset": 1, "logprobs": floats(-1), "ranks": pack(1), **changes}
    part = worker_pb2.PromptLogprobs(**fields)  # type: ignore[arg-type]  # any field
    return worker_pb2.StepResult(prompt_logprobs=[part])


def vector(*values: float) -> worker_pb2.StepResult:
    return worker_pb2.StepResult(vectors=[worker_pb2.RowVector(row=2, values=floats(*values))])


NAN = float("nan")


@pytest.mark.parametrize(
    ("result", "complaint"),
    [
        (told(floats(-1), b""), "1 tokens have 1 log-probabilities and 0 ranks"),
        (told(floats(-1, -1), pack(1, 1)), "1 tokens have 2 log-probabilities and 2 ranks"),
        (told(floats(0.5), pack(1)), "logprobs must be at most 0"),
        (told(floats(NAN), pack(1)), "logprobs must be at most 0"),
        (told(floats(-1), pack(101)), "ranks go from 101 to 101, must be 0 to 100"),
        (told(floats(-1), pack(-1)), "ranks go from -1 to -1, must be 0 to 100"),
        (prompt_told(logprobs=b""), "0 prompt positions have 1 ranks"),
        (prompt_told(candidate_ids=pack(1)), "1 candidates and 0 log-probabilities"),
        (prompt_told(offset=0), "an offset of at least 1"),
        (prompt_told(ranks=pack(0)), "ranks go from 0 to 0, must be 1 to 100"),
        (prompt_told(logprobs=floats(NAN)), "logprobs must be at most 0"),
        (
            prompt_told(candidate_ids=pack(100), candidate_logprobs=floats(-1)),
            "candidate_ids go from 100",
        ),
        (
            prompt_told(candidate_ids=pack(1), candidate_logprobs=floats(NAN)),
            "candidate_logprobs must be at most 0",
        ),
        (vector(), "the vector of row 2 must be finite numbers"),
        (vector(1, NAN), "the vector of row 2 must be finite numbers"),
    ],
)
def test_what_is_told_and_cannot_be_is_refused_by_name(
    result: worker_pb2.StepResult, complaint: str
) -> None:
    with pytest.raises(MalformedMessageError, match=complaint):
        decode_result(result, vocab_size=100)


def test_several_tokens_and_candidates_of_rows_arrive() -> None:
    message = worker_pb2.StepResult(
        tokens=pack(7, 8, 9),
        rows=pack(3, 5),
        num_tokens=pack(2, 1),
        num_candidates=pack(0, 2),
        candidate_ids=pack(9, 4),
        candidate_logprobs=np.array([-0.5, float("-inf")], dtype="<f4").tobytes(),
    )
    result = decode_result(message, vocab_size=100).result
    assert result.rows is not None
    assert result.num_tokens is not None
    assert result.candidates is not None
    assert (result.rows.tolist(), result.num_tokens.tolist()) == ([3, 5], [2, 1])
    assert result.candidates.counts.tolist() == [0, 2]
    assert result.candidates.ids.tolist() == [9, 4]
    assert result.candidates.logprobs.dtype == np.float32
    assert result.candidates.logprobs.tolist() == [-0.5, float("-inf")]


@pytest.mark.parametrize(
    ("result", "complaint"),
    [
        (worker_pb2.StepResult(tokens=b"\1\0\0"), "tokens has 3 bytes"),
        (worker_pb2.StepResult(tokens=pack(100)), "tokens go from 100 to 100, must be 0 to 99"),
        (worker_pb2.StepResult(tokens=pack(-1, 5)), "tokens go from -1 to 5"),
        (worker_pb2.StepResult(tokens=pack(1), rows=pack(0, 1)), "rows have 2 tokens, there are 1"),
        (worker_pb2.StepResult(tokens=pack(1, 2), rows=pack(3, 3)), "rows must ascend"),
        (worker_pb2.StepResult(tokens=pack(1, 2), num_tokens=pack(2)), "must come with rows"),
        (worker_pb2.StepResult(tokens=pack(1), num_tokens=pack(1, 1)), "rows have 2 tokens"),
        (one_row(num_tokens=pack(1, 1)), "num_tokens has 2 entries, rows 1"),
        (one_row(num_tokens=pack(2)), "rows have 2 tokens, there are 1"),
        (one_row(num_tokens=pack(0)), "num_tokens must be at least 1"),
        (worker_pb2.StepResult(tokens=pack(7), num_candidates=pack(0)), "one entry for each"),
        (one_row(num_candidates=pack(0, 0)), "one entry for each of rows"),
        (one_row(num_candidates=pack(-1)), "must not be negative"),
        (one_row(num_candidates=pack(2), candidate_ids=pack(7)), "2 candidates, there are 1 ids"),
        (one_row(num_candidates=pack(1), candidate_ids=pack(100)), "candidate_ids go from 100"),
        (candidates(0.5), "candidate_logprobs must be at most 0"),
        (candidates(float("nan")), "candidate_logprobs must be at most 0"),
        (one_row(num_candidates=pack(1), candidate_logprobs=b"abc"), "has 3 bytes, must be float"),
    ],
)
def test_a_result_that_cannot_be_read_is_refused_by_name(
    result: worker_pb2.StepResult, complaint: str
) -> None:
    with pytest.raises(MalformedMessageError, match=complaint):
        decode_result(result, vocab_size=100)


@given(raw=st.binary(max_size=40))
def test_any_bytes_are_a_message_or_refused(raw: bytes) -> None:
    with suppress(MalformedMessageError):
        decode_message(raw)
