"""Plans and results as workers read and write them: the only code that packs their columns."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from google.protobuf.message import DecodeError

from pagemill.v1 import worker_pb2
from scheduler_svc.core.step_plan import AdmittedRow, Int32Array, StepPlan, StepResult

_WIRE_INT32 = np.dtype("<i4")

_MAX_STEP_NS = 24 * 3600 * 10**9

MAX_REASON_CHARACTERS = 300
"""A worker's sentence reaches logs and clients."""


class MalformedMessageError(Exception):
    """A worker sent what cannot be read. Ends its stream, and nothing else."""


@dataclass(frozen=True, slots=True)
class Epoch:
    """A worker group's incarnation."""

    incarnation: int
    """The scheduler process's random 64-bit number."""

    number: int
    """Raised each time the whole group has joined."""

    def is_up_to(self, latest: "Epoch") -> bool:
        """Whether this is `latest` or one before it, of the same scheduler."""
        return self.incarnation == latest.incarnation and self.number <= latest.number


@dataclass(frozen=True, slots=True)
class WorkerTiming:
    """Where a step's time went in the worker: nanoseconds of its clock, as in StepTiming."""

    wait_ns: int
    prepare_ns: int
    forward_ns: int
    sample_ns: int
    execute_ns: int
    codec_ns: int


@dataclass(frozen=True, slots=True)
class StepAnswer:
    """A worker's result, read and checked as far as that goes without its plan."""

    epoch: Epoch
    result: StepResult
    timing: WorkerTiming


def encode_plan(plan: StepPlan, epoch: Epoch, traceparent: str) -> bytes:
    """Return the JoinResponse that carries a plan.

    Cost: 7 us for a steady decode of any number of rows, 2 cores, Python 3.11.
    """
    message = worker_pb2.StepPlan(
        step_id=plan.step_id,
        epoch=worker_pb2.Epoch(incarnation=epoch.incarnation, number=epoch.number),
        reset=plan.reset,
        released_rows=_pack(plan.released_rows),
        admitted=[_admitted_row(row) for row in plan.admitted],
        appended=[
            worker_pb2.AppendedBlocks(
                group=part.group, rows=_pack(part.rows), blocks=_pack(part.blocks)
            )
            for part in plan.appended
        ],
        exception_rows=_pack(plan.exception_rows),
        exception_num_computed_tokens=_pack(plan.exception_num_computed_tokens),
        exception_num_new_tokens=_pack(plan.exception_num_new_tokens),
        copy_sources=_pack(plan.copy_sources),
        copy_destinations=_pack(plan.copy_destinations),
        traceparent=traceparent,
    )
    return worker_pb2.JoinResponse(plan=message).SerializeToString()


def _admitted_row(row: AdmittedRow) -> worker_pb2.AdmittedRow:
    sampling = row.sampling
    return worker_pb2.AdmittedRow(
        row=row.row,
        request_id=row.request_id,
        tokens=_pack(row.tokens),
        num_prompt_tokens=row.num_prompt_tokens,
        num_computed_tokens=row.num_computed_tokens,
        num_new_tokens=row.num_new_tokens,
        block_tables=[_pack(table) for table in row.block_tables],
        sampling=worker_pb2.RowSampling(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=sampling.seed,
        ),
        sequence_index=row.sequence_index,
    )


def decode_message(raw: bytes) -> worker_pb2.JoinRequest:
    """Read a worker's message.

    Raises: MalformedMessageError if the bytes are none.
    """
    try:
        return worker_pb2.JoinRequest.FromString(raw)
    except DecodeError as error:
        raise MalformedMessageError(f"no JoinRequest: {error}") from error


def decode_result(message: worker_pb2.StepResult, vocab_size: int) -> StepAnswer:
    """Read a result's columns.

    Raises: MalformedMessageError if a column is cut, columns differ in length, a row gave
        more tokens than one, or a token is none of the vocabulary.
    """
    tokens = _unpack("tokens", message.tokens)
    # Seen as unsigned, a negative id is too large: one look at the column instead of two.
    if len(tokens) and tokens.view(np.uint32).max() >= vocab_size:
        raise MalformedMessageError(
            f"tokens go from {tokens.min()} to {tokens.max()}, must be 0 to {vocab_size - 1}"
        )
    rows = _rows_of_one_token(message, len(tokens))
    timing = message.timing
    if max(timing.wait_ns, timing.execute_ns, timing.codec_ns) > _MAX_STEP_NS:
        raise MalformedMessageError(f"timing is longer than a step may be: {_MAX_STEP_NS} ns")
    return StepAnswer(
        Epoch(message.epoch.incarnation, message.epoch.number),
        StepResult(message.step_id, tokens, _row_errors(message.errors), rows),
        WorkerTiming(
            timing.wait_ns,
            timing.prepare_ns,
            timing.forward_ns,
            timing.sample_ns,
            timing.execute_ns,
            timing.codec_ns,
        ),
    )


def _rows_of_one_token(message: worker_pb2.StepResult, num_tokens: int) -> Int32Array | None:
    """Return the rows that the message names, if any; each must have one token."""
    if not message.rows and not message.num_tokens:
        return None
    rows = _unpack("rows", message.rows)
    counts = _unpack("num_tokens", message.num_tokens)
    for name, column in (("rows", rows), ("num_tokens", counts)):
        if len(column) not in (0, num_tokens):
            raise MalformedMessageError(f"{name} has {len(column)} entries, tokens {num_tokens}")
    if (np.diff(rows) <= 0).any():
        raise MalformedMessageError("rows must ascend")
    if (counts != 1).any():
        raise MalformedMessageError("num_tokens must be 1 in every row")
    return rows if message.rows else None


def _row_errors(errors: Sequence[worker_pb2.RowError]) -> tuple[tuple[int, str], ...]:
    return tuple((error.row, error.reason[:MAX_REASON_CHARACTERS]) for error in errors)


def _pack(column: Int32Array) -> bytes:
    return column.astype(_WIRE_INT32, copy=False).tobytes()


def _unpack(name: str, raw: bytes) -> Int32Array:
    if len(raw) % _WIRE_INT32.itemsize:
        raise MalformedMessageError(f"{name} has {len(raw)} bytes, must be int32 words")
    return np.frombuffer(raw, dtype=_WIRE_INT32).astype(np.int32, copy=False)
