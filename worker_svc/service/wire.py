"""Messages of the worker stream to step plans, and step results to messages.

The only place that packs or reads columns. A column is little-endian int32 in `bytes`
(log-probabilities: float32); reading one makes a read-only view, not a copy.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from pagemill.v1 import generation_pb2, worker_pb2
from worker_svc.errors import InvariantError
from worker_svc.runtime.step_plan import (
    AdmittedRow,
    AppendedBlocks,
    BlockCopies,
    Draft,
    EmbeddedSpan,
    Float32Array,
    ForkedRow,
    Int32Array,
    Pooling,
    SamplingParams,
    StepPlan,
    StepResult,
)

INT32 = np.dtype("<i4")
FLOAT32 = np.dtype("<f4")

MAX_KV_GROUPS = 64
"""More than any model has: a bound on what one number in a message can make us allocate."""

PLAN_FEATURES_NOT_SERVED = ("transfers",)
"""Fields that change what later steps mean: a plan that uses one cannot be answered."""

_ELEMENT_TYPES: Mapping[int, str] = {
    generation_pb2.ELEMENT_TYPE_FLOAT16: "float16",
    generation_pb2.ELEMENT_TYPE_FLOAT32: "float32",
    generation_pb2.ELEMENT_TYPE_BFLOAT16: "bfloat16",
}

ROW_FEATURES_NOT_SERVED: dict[str, Callable[[worker_pb2.AdmittedRow], bool]] = {
    "guide_json": lambda row: bool(row.guide_json),
}
"""Fields that change what one row gives, and whether a row uses them: that row alone fails."""


@dataclass(frozen=True, slots=True)
class Epoch:
    """A group's incarnation."""

    incarnation: int
    """The scheduler's, random."""

    number: int
    """Raised each time the whole group has joined."""


@dataclass(frozen=True, slots=True, eq=False)
class ReceivedPlan:
    """A step plan as it came off the stream."""

    plan: StepPlan

    epoch: Epoch
    """The incarnation it is for. The result echoes it."""

    refusals: tuple[tuple[int, str], ...]
    """Admitted rows that ask for what is not served, each with its reason."""

    arrived_ns: int
    """When it arrived, on the monotonic clock."""

    decode_ns: int
    """Nanoseconds that reading it took."""


def read_plan(message: worker_pb2.StepPlan) -> StepPlan:
    """Return the plan of a message.

    Raises: InvariantError if columns do not fit together, or the plan as a whole uses a feature
        that is not served.
    """
    for feature in PLAN_FEATURES_NOT_SERVED:
        if getattr(message, feature):
            raise InvariantError(f"plan uses {feature}, which this worker does not serve")
    exceptions = _columns(
        exception_rows=message.exception_rows,
        exception_num_computed_tokens=message.exception_num_computed_tokens,
        exception_num_new_tokens=message.exception_num_new_tokens,
    )
    copies = _columns(
        copy_sources=message.copy_sources, copy_destinations=message.copy_destinations
    )
    return StepPlan(
        step_id=message.step_id,
        reset=message.reset,
        released_rows=_column("released_rows", message.released_rows),
        forked=tuple(_read_forked(fork) for fork in message.forked),
        admitted=tuple(_read_admitted(row) for row in message.admitted),
        appended=_read_appended(message),
        copies=BlockCopies(*copies),
        exception_rows=exceptions[0],
        exception_num_computed_tokens=exceptions[1],
        exception_num_new_tokens=exceptions[2],
        drafts=tuple(Draft(one.row, _column("drafts", one.tokens)) for one in message.drafts),
    )


def read_refusals(message: worker_pb2.StepPlan) -> tuple[tuple[int, str], ...]:
    """Return the admitted rows that ask for what is not served, each with its reason."""
    return tuple(
        (row.row, f"{feature} is asked for, which this worker does not serve")
        for row in message.admitted
        if (feature := _first_not_served(row)) is not None
    )


def read_epoch(message: worker_pb2.StepPlan) -> Epoch:
    """Return the incarnation a plan is for."""
    return Epoch(message.epoch.incarnation, message.epoch.number)


def write_result(result: StepResult, epoch: Epoch) -> worker_pb2.StepResult:
    """Return the message of a result, but for what the shell alone knows of its timing.

    `rows` stays empty where every row that sampled has one token, and nothing else.
    """
    timing, candidates = result.timing, result.candidates
    message = worker_pb2.StepResult(
        step_id=result.step_id,
        epoch=worker_pb2.Epoch(incarnation=epoch.incarnation, number=epoch.number),
        tokens=pack(result.tokens),
        errors=[worker_pb2.RowError(row=row, reason=reason) for row, reason in result.row_errors],
        timing=worker_pb2.StepTiming(
            prepare_ns=timing.prepare_ns,
            forward_ns=timing.forward_ns,
            sample_ns=timing.sample_ns,
            execute_ns=timing.total_ns,
        ),
    )
    if len(result.num_tokens) or candidates is not None or result.token_logprobs is not None:
        message.rows = pack(result.rows)
        message.num_tokens = pack(result.num_tokens)
    if candidates is not None:
        message.candidate_ids = pack(candidates.ids)
        message.candidate_logprobs = pack_floats(candidates.logprobs)
        message.num_candidates = pack(candidates.counts)
    if result.token_logprobs is not None:
        message.logprobs = pack_floats(result.token_logprobs.logprobs)
        message.ranks = pack(result.token_logprobs.ranks)
    for part in result.prompt_logprobs:
        message.prompt_logprobs.add(
            row=part.row,
            offset=part.offset,
            logprobs=pack_floats(part.logprobs),
            ranks=pack(part.ranks),
            candidate_ids=pack(part.candidate_ids),
            candidate_logprobs=pack_floats(part.candidate_logprobs),
        )
    for vector in result.vectors:
        message.vectors.add(row=vector.row, values=pack_floats(vector.values))
    return message


def pack(column: Int32Array) -> bytes:
    """Return a column as it travels."""
    return column.astype(INT32, copy=False).tobytes()


def pack_floats(column: Float32Array) -> bytes:
    """Return a column of log-probabilities, or a vector, as it travels."""
    return column.astype(FLOAT32, copy=False).tobytes()


def _float_column(name: str, packed: bytes) -> Float32Array:
    if len(packed) % FLOAT32.itemsize:
        raise InvariantError(f"{name} has {len(packed)} bytes, must be a multiple of 4")
    return np.frombuffer(packed, dtype=FLOAT32)


def _column(name: str, packed: bytes) -> Int32Array:
    if len(packed) % INT32.itemsize:
        raise InvariantError(f"{name} has {len(packed)} bytes, must be a multiple of 4")
    return np.frombuffer(packed, dtype=INT32)


def _columns(**packed: bytes) -> tuple[Int32Array, ...]:
    """Read columns of one table, which must be equally long."""
    columns = tuple(_column(name, column) for name, column in packed.items())
    if len({len(column) for column in columns}) > 1:
        lengths = ", ".join(
            f"{name} {len(column)}" for name, column in zip(packed, columns, strict=True)
        )
        raise InvariantError(f"columns must have one length, not {lengths}")
    return columns


def _read_admitted(row: worker_pb2.AdmittedRow) -> AdmittedRow:
    return AdmittedRow(
        row=row.row,
        request_id=row.request_id,
        tokens=_column("tokens", row.tokens),
        num_prompt_tokens=row.num_prompt_tokens,
        num_computed_tokens=row.num_computed_tokens,
        num_new_tokens=row.num_new_tokens,
        block_tables=tuple(_column("block_tables", table) for table in row.block_tables),
        sampling=_read_sampling(row.sampling),
        sequence_index=row.sequence_index,
        num_samples=max(1, row.num_samples),
        num_candidates=row.num_candidates,
        adapter=row.adapter,
        embeddings=tuple(
            EmbeddedSpan(span.offset, span.embeddings, _ELEMENT_TYPES.get(span.element_type, ""))
            for span in row.embeddings
        ),
        logprobs=row.logprobs,
        prompt_logprobs=row.prompt_logprobs if row.HasField("prompt_logprobs") else None,
        pooling=_read_pooling(row) if row.pooled else None,
    )


def _read_sampling(sampling: worker_pb2.RowSampling) -> SamplingParams:
    bias_ids, bias_values = (
        _column("bias_token_ids", sampling.bias_token_ids),
        _float_column("bias_values", sampling.bias_values),
    )
    if len(bias_ids) != len(bias_values):
        raise InvariantError(f"{len(bias_ids)} token ids have {len(bias_values)} biases")
    bad_words = tuple(_column("bad_words", word) for word in sampling.bad_words)
    if not all(map(len, bad_words)):
        raise InvariantError("bad_words has an empty one")
    return SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty or 1.0,
        min_tokens=sampling.min_tokens,
        stop_token_ids=_column("stop_token_ids", sampling.stop_token_ids),
        bias_token_ids=bias_ids,
        bias_values=bias_values,
        allowed_token_ids=_column("allowed_token_ids", sampling.allowed_token_ids),
        bad_words=bad_words,
    )


def _read_pooling(row: worker_pb2.AdmittedRow) -> Pooling:
    # As pagemill.v1.Pooling, where unspecified means the last token's.
    if row.pooling not in (0, *Pooling):
        raise InvariantError(f"row {row.row} has pooling {row.pooling}, must be 0, 1 or 2")
    return Pooling(row.pooling or Pooling.LAST)


def _read_forked(fork: worker_pb2.ForkedRow) -> ForkedRow:
    return ForkedRow(
        row=fork.row,
        parent_row=fork.parent_row,
        sequence_index=fork.sequence_index,
        last_token=fork.last_token if fork.HasField("last_token") else None,
        num_blocks=fork.num_blocks,
    )


def _read_appended(message: worker_pb2.StepPlan) -> tuple[AppendedBlocks, ...]:
    """Return one entry per KV group up to the last that gains blocks."""
    groups: list[AppendedBlocks] = []
    nothing = AppendedBlocks(np.empty(0, INT32), np.empty(0, INT32))
    for entry in message.appended:
        if not len(groups) <= entry.group < MAX_KV_GROUPS:
            raise InvariantError(
                f"appended group {entry.group}, must be at least {len(groups)} (ascending) "
                f"and below {MAX_KV_GROUPS}"
            )
        groups += [nothing] * (entry.group - len(groups))
        groups.append(AppendedBlocks(*_columns(rows=entry.rows, blocks=entry.blocks)))
    return tuple(groups)


def _first_not_served(row: worker_pb2.AdmittedRow) -> str | None:
    return next((name for name, used in ROW_FEATURES_NOT_SERVED.items() if used(row)), None)
