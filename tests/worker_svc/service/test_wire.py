"""A step plan is the same behind the wire, and a result before it; what does not fit is refused."""

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill.v1 import worker_pb2
from worker_svc.errors import InvariantError
from worker_svc.runtime.logit_rules import read_rules
from worker_svc.runtime.step_plan import (
    Candidates,
    EmbeddedSpan,
    Int32Array,
    Pooling,
    PromptLogprobs,
    RowVector,
    StepResult,
    StepTiming,
    TokenLogprobs,
)
from worker_svc.service import wire

ids = st.integers(0, 2**31 - 1)
columns = st.lists(ids, max_size=8)


def encode(values: Sequence[int]) -> bytes:
    """Pack a column without numpy, as any other program would."""
    return struct.pack(f"<{len(values)}i", *values)


def tables(width: int) -> st.SearchStrategy[list[tuple[int, ...]]]:
    """Return tables of so many columns."""
    return st.lists(st.tuples(*[ids] * width), max_size=6)


def turned(table: list[tuple[int, ...]], width: int) -> list[list[int]]:
    """Return a table's columns."""
    return [[line[column] for line in table] for column in range(width)]


float32s = st.floats(0, 8, width=32)
uint32s = st.integers(0, 2**32 - 1)

admitted_rows = st.fixed_dictionaries(
    {
        "row": st.integers(0, 1023),
        "request_id": st.text(max_size=8),
        "tokens": columns,
        "num_prompt_tokens": ids,
        "num_computed_tokens": ids,
        "num_new_tokens": ids,
        "block_tables": st.lists(columns, max_size=3),
        "sequence_index": ids,
        "num_samples": st.integers(0, 2**32 - 1),
        "num_candidates": uint32s,
        "temperature": float32s,
        "top_k": ids,
        "top_p": float32s,
        "min_p": float32s,
        "seed": st.integers(0, 2**64 - 1),
    }
)

forked_rows = st.fixed_dictionaries(
    dict.fromkeys(("row", "parent_row", "sequence_index", "num_blocks"), uint32s),
    optional={"last_token": st.integers(-(2**31), 2**31 - 1)},
)

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed")


def encode_row(row: dict[str, Any]) -> worker_pb2.AdmittedRow:
    plain = {
        name: value
        for name, value in row.items()
        if name not in {"tokens", "block_tables", *SAMPLING}
    }
    return worker_pb2.AdmittedRow(
        **plain,
        tokens=encode(row["tokens"]),
        block_tables=[encode(table) for table in row["block_tables"]],
        sampling=worker_pb2.RowSampling(**{name: row[name] for name in SAMPLING}),
    )


def same(column: Int32Array, values: Sequence[int]) -> bool:
    return column.dtype == np.int32 and column.tolist() == list(values)


@given(
    step_id=st.integers(0, 2**40),
    reset=st.booleans(),
    released=columns,
    forked=st.lists(forked_rows, max_size=4),
    admitted=st.lists(admitted_rows, max_size=4),
    appended=st.dictionaries(st.integers(0, 4), tables(2), max_size=3),
    copies=tables(2),
    exceptions=tables(3),
)
def test_a_plan_is_read_as_it_was_written(
    step_id: int,
    reset: bool,
    released: list[int],
    forked: list[dict[str, int]],
    admitted: list[dict[str, Any]],
    appended: dict[int, list[tuple[int, ...]]],
    copies: list[tuple[int, ...]],
    exceptions: list[tuple[int, ...]],
) -> None:
    copied, excepted = turned(copies, 2), turned(exceptions, 3)
    message = worker_pb2.StepPlan(
        step_id=step_id,
        epoch=worker_pb2.Epoch(incarnation=2**64 - 1, number=3),
        reset=reset,
        released_rows=encode(released),
        forked=[worker_pb2.ForkedRow(**fork) for fork in forked],
        admitted=[encode_row(row) for row in admitted],
        appended=[
            worker_pb2.AppendedBlocks(
                group=group, rows=encode(rows_and_blocks[0]), blocks=encode(rows_and_blocks[1])
            )
            for group, table in sorted(appended.items())
            if (rows_and_blocks := turned(table, 2))
        ],
        copy_sources=encode(copied[0]),
        copy_destinations=encode(copied[1]),
        exception_rows=encode(excepted[0]),
        exception_num_computed_tokens=encode(excepted[1]),
        exception_num_new_tokens=encode(excepted[2]),
    )
    travelled = worker_pb2.StepPlan.FromString(message.SerializeToString())
    plan = wire.read_plan(travelled)
    assert wire.read_epoch(travelled) == wire.Epoch(2**64 - 1, 3)
    assert wire.read_refusals(travelled) == ()
    assert (plan.step_id, plan.reset) == (step_id, reset)
    assert same(plan.released_rows, released)
    assert same(plan.copies.src, copied[0])
    assert same(plan.copies.dst, copied[1])
    assert same(plan.exception_rows, excepted[0])
    assert same(plan.exception_num_computed_tokens, excepted[1])
    assert same(plan.exception_num_new_tokens, excepted[2])
    assert len(plan.appended) == max(appended, default=-1) + 1
    for group, gained in enumerate(plan.appended):
        rows, blocks = turned(appended.get(group, []), 2)
        assert same(gained.rows, rows)
        assert same(gained.blocks, blocks)
    unset = {"last_token": None}
    assert [fork._asdict() for fork in plan.forked] == [unset | fork for fork in forked]
    for row, expected in zip(plan.admitted, admitted, strict=True):
        assert same(row.tokens, expected["tokens"])
        assert len(row.block_tables) == len(expected["block_tables"])
        for table, values in zip(row.block_tables, expected["block_tables"], strict=True):
            assert same(table, values)
        for name in ("row", "request_id", "num_prompt_tokens", "num_computed_tokens"):
            assert getattr(row, name) == expected[name]
        assert row.num_new_tokens == expected["num_new_tokens"]
        assert row.sequence_index == expected["sequence_index"]
        assert row.num_samples == (expected["num_samples"] or 1)
        assert row.num_candidates == expected["num_candidates"]
        for name in SAMPLING:
            assert getattr(row.sampling, name) == expected[name]


@given(
    step_id=st.integers(0, 2**40),
    sampled=tables(2),
    errors=st.lists(st.tuples(st.integers(0, 1023), st.text(max_size=8)), max_size=3),
    times=st.tuples(*[st.integers(0, 2**63)] * 4),
)
def test_a_result_is_written_as_it_is(
    step_id: int,
    sampled: list[tuple[int, ...]],
    errors: list[tuple[int, str]],
    times: tuple[int, ...],
) -> None:
    rows, tokens = (np.array(column, dtype=np.int32) for column in turned(sampled, 2))
    result = StepResult(step_id, rows, tokens, StepTiming(*times), tuple(errors))
    written = wire.write_result(result, wire.Epoch(9, 4))
    message = worker_pb2.StepResult.FromString(written.SerializeToString())
    assert (message.step_id, message.epoch.incarnation, message.epoch.number) == (step_id, 9, 4)
    assert message.tokens == encode(tokens.tolist())
    assert not message.rows  # one token for each row that sampled
    assert [(error.row, error.reason) for error in message.errors] == errors
    timing = message.timing
    assert (timing.prepare_ns, timing.forward_ns, timing.sample_ns, timing.execute_ns) == times


float32_columns = st.lists(st.floats(-100, 0, width=32), max_size=8)


@given(
    rows=columns,
    tokens=columns,
    num_tokens=columns,
    candidates=st.none() | st.tuples(columns, float32_columns, columns),
)
def test_several_tokens_and_candidates_travel_with_the_rows_they_belong_to(
    rows: list[int],
    tokens: list[int],
    num_tokens: list[int],
    candidates: tuple[list[int], list[float], list[int]] | None,
) -> None:
    result = StepResult(
        step_id=1,
        rows=np.array(rows, dtype=np.int32),
        tokens=np.array(tokens, dtype=np.int32),
        timing=StepTiming(0, 0, 0, 0),
        row_errors=(),
        num_tokens=np.array(num_tokens, dtype=np.int32),
        candidates=candidates
        and Candidates(
            ids=np.array(candidates[0], dtype=np.int32),
            logprobs=np.array(candidates[1], dtype=np.float32),
            counts=np.array(candidates[2], dtype=np.int32),
        ),
    )
    written = wire.write_result(result, wire.Epoch(9, 4))
    message = worker_pb2.StepResult.FromString(written.SerializeToString())
    assert message.tokens == encode(tokens)
    assert message.rows == (encode(rows) if num_tokens or candidates else b"")
    assert message.num_tokens == encode(num_tokens)
    some_ids, logprobs, counts = candidates or ([], [], [])
    assert message.candidate_ids == encode(some_ids)
    assert message.candidate_logprobs == struct.pack(f"<{len(logprobs)}f", *logprobs)
    assert message.num_candidates == encode(counts)


@pytest.mark.parametrize("name", ["released_rows", "exception_rows", "copy_sources"])
@given(extra=st.integers(1, 3))
def test_a_column_of_broken_integers_is_refused(name: str, extra: int) -> None:
    message = worker_pb2.StepPlan(**{name: bytes(4 + extra)})  # type: ignore[arg-type]
    with pytest.raises(InvariantError, match=f"{name} has {4 + extra} bytes"):
        wire.read_plan(message)


@pytest.mark.parametrize(
    "changes",
    [
        {"copy_sources": encode([1, 2]), "copy_destinations": encode([3])},
        {"exception_rows": encode([1])},
        {"appended": [worker_pb2.AppendedBlocks(rows=encode([1]))]},
    ],
)
def test_columns_of_unequal_length_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvariantError, match=r"columns must have one length, not .* 1"):
        wire.read_plan(worker_pb2.StepPlan(**changes))


@pytest.mark.parametrize("groups", [[0, 0], [1, 0], [2**32 - 1]])
def test_groups_that_descend_or_cannot_be_are_refused(groups: list[int]) -> None:
    message = worker_pb2.StepPlan(
        appended=[worker_pb2.AppendedBlocks(group=group) for group in groups]
    )
    with pytest.raises(InvariantError, match=f"appended group {groups[-1]}, must be"):
        wire.read_plan(message)


NOT_SERVED_BY_ROW: dict[str, worker_pb2.AdmittedRow] = {
    "guide_json": worker_pb2.AdmittedRow(guide_json="{}"),
}


def test_each_feature_of_a_row_that_is_not_served_is_named() -> None:
    assert set(NOT_SERVED_BY_ROW) == set(wire.ROW_FEATURES_NOT_SERVED)
    for name, row in NOT_SERVED_BY_ROW.items():
        row.row = 3
        ((refused, reason),) = wire.read_refusals(worker_pb2.StepPlan(admitted=[row]))
        assert refused == 3
        assert reason == f"{name} is asked for, which this worker does not serve"


def test_what_a_row_may_draw_and_wants_told_arrives() -> None:
    row = worker_pb2.AdmittedRow(
        logprobs=True,
        prompt_logprobs=0,
        pooled=True,
        sampling=worker_pb2.RowSampling(
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            repetition_penalty=1.5,
            min_tokens=3,
            stop_token_ids=encode([1]),
            bias_token_ids=encode([2, 4]),
            bias_values=struct.pack("<2f", 0.5, -3.0),
            allowed_token_ids=encode([5, 6]),
            bad_words=[encode([7]), encode([8, 9])],
        ),
    )
    (read,) = wire.read_plan(worker_pb2.StepPlan(admitted=[row])).admitted
    assert (read.logprobs, read.prompt_logprobs, read.pooling) == (True, 0, Pooling.LAST)
    params = read.sampling
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, -0.5)
    assert (params.repetition_penalty, params.min_tokens) == (1.5, 3)
    assert params.stop_token_ids.tolist() == [1]
    assert params.bias_token_ids.tolist() == [2, 4]
    assert params.bias_values.tolist() == [0.5, -3.0]
    assert params.allowed_token_ids.tolist() == [5, 6]
    assert [word.tolist() for word in params.bad_words] == [[7], [8, 9]]
    assert wire.read_refusals(worker_pb2.StepPlan(admitted=[row])) == ()


def test_what_a_row_leaves_out_is_off() -> None:
    (read,) = wire.read_plan(worker_pb2.StepPlan(admitted=[worker_pb2.AdmittedRow()])).admitted
    assert (read.logprobs, read.prompt_logprobs, read.pooling) == (False, None, None)
    assert read.sampling.repetition_penalty == 1.0
    assert read_rules(read) is None


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"bias_token_ids": encode([1, 2]), "bias_values": bytes(4)}, "2 token ids have 1 biases"),
        ({"bias_values": bytes(3)}, "bias_values has 3 bytes"),
        ({"bad_words": [b""]}, "bad_words has an empty one"),
    ],
)
def test_rules_that_do_not_fit_together_are_refused(
    changes: dict[str, Any], complaint: str
) -> None:
    row = worker_pb2.AdmittedRow(sampling=worker_pb2.RowSampling(**changes))
    with pytest.raises(InvariantError, match=complaint):
        wire.read_plan(worker_pb2.StepPlan(admitted=[row]))


def test_a_pooling_that_is_none_is_refused() -> None:
    row = worker_pb2.AdmittedRow(row=3, pooled=True, pooling=3)
    with pytest.raises(InvariantError, match="row 3 has pooling 3, must be 0, 1 or 2"):
        wire.read_plan(worker_pb2.StepPlan(admitted=[row]))


def test_what_is_told_of_tokens_prompts_and_rows_is_written() -> None:
    floats, ints = np.float32, np.int32
    part = PromptLogprobs(
        4,
        2,
        np.array([-0.5], floats),
        np.array([3], ints),
        np.array([7, 8], ints),
        np.array([-0.25, -0.75], floats),
    )
    result = StepResult(
        step_id=1,
        rows=np.array([2, 4], ints),
        tokens=np.array([5, 6], ints),
        timing=StepTiming(0, 0, 0, 0),
        row_errors=(),
        token_logprobs=TokenLogprobs(np.array([-1.5, 0], floats), np.array([2, 0], ints)),
        prompt_logprobs=(part,),
        vectors=(RowVector(9, np.array([0.5, -2.0], floats)),),
    )
    message = wire.write_result(result, wire.Epoch(1, 2))
    assert message.rows == encode([2, 4])
    assert (message.logprobs, message.ranks) == (struct.pack("<2f", -1.5, 0), encode([2, 0]))
    assert message.prompt_logprobs[0] == worker_pb2.PromptLogprobs(
        row=4,
        offset=2,
        logprobs=struct.pack("<f", -0.5),
        ranks=encode([3]),
        candidate_ids=encode([7, 8]),
        candidate_logprobs=struct.pack("<2f", -0.25, -0.75),
    )
    assert message.vectors[0] == worker_pb2.RowVector(row=9, values=struct.pack("<2f", 0.5, -2))


@pytest.mark.parametrize(
    ("feature", "changes"),
    [
        ("transfers", {"transfers": [worker_pb2.BlockTransfer()]}),
    ],
)
def test_each_feature_that_changes_rows_or_keys_and_is_not_served_stops_the_plan(
    feature: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(InvariantError, match=f"uses {feature}, which this worker does not serve"):
        wire.read_plan(worker_pb2.StepPlan(**changes))


def test_a_rows_adapter_and_embeddings_are_read() -> None:
    spans = [
        worker_pb2.EmbeddingSpanRow(offset=3, embeddings=b"abcd", element_type=2),
        worker_pb2.EmbeddingSpanRow(offset=9, embeddings=b"ef", element_type=77),
    ]
    row = worker_pb2.AdmittedRow(tokens=encode([1]), adapter=5, embeddings=spans)
    (read,) = wire.read_plan(worker_pb2.StepPlan(admitted=[row])).admitted
    assert read.adapter == 5
    assert read.embeddings == (EmbeddedSpan(3, b"abcd", "float32"), EmbeddedSpan(9, b"ef", ""))


def test_every_field_of_a_plan_is_read_or_refused() -> None:
    """A field that is added to the wire must be served, refused, or listed here with a reason."""
    ignored_plan = {
        "traceparent",  # spans are made by the scheduler, from the result's timing
        "serial_rows",  # says how the scheduler plans
    }
    read_plan = {
        *{"step_id", "epoch", "reset", "released_rows", "forked", "admitted", "appended"},
        *{"copy_sources", "copy_destinations", "drafts"},
        *{"exception_rows", "exception_num_computed_tokens", "exception_num_new_tokens"},
    }
    assert {field.name for field in worker_pb2.StepPlan.DESCRIPTOR.fields} == (
        read_plan | ignored_plan | set(wire.PLAN_FEATURES_NOT_SERVED)
    )
    read_row = {
        *{"row", "request_id", "tokens", "block_tables", "sampling", "sequence_index"},
        *{"num_prompt_tokens", "num_computed_tokens", "num_new_tokens"},
        *{"num_samples", "num_candidates", "logprobs", "prompt_logprobs", "pooled", "pooling"},
        *{"adapter", "embeddings"},
    }
    read_sampling = {field.name for field in worker_pb2.RowSampling.DESCRIPTOR.fields}
    fields = {field.name for field in worker_pb2.AdmittedRow.DESCRIPTOR.fields}
    fields |= {field.name for field in worker_pb2.RowSampling.DESCRIPTOR.fields}
    assert fields == (read_row | read_sampling | set(wire.ROW_FEATURES_NOT_SERVED))


def test_drafts_are_read_row_by_row() -> None:
    message = worker_pb2.StepPlan(
        drafts=[
            worker_pb2.Draft(row=2, tokens=encode([7, 8])),
            worker_pb2.Draft(row=5, tokens=encode([9])),
        ]
    )
    drafts = wire.read_plan(message).drafts
    assert [(draft.row, draft.tokens.tolist()) for draft in drafts] == [(2, [7, 8]), (5, [9])]
    with pytest.raises(InvariantError, match="drafts has 3 bytes"):
        wire.read_plan(worker_pb2.StepPlan(drafts=[worker_pb2.Draft(row=1, tokens=b"abc")]))
