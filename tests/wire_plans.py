"""Plans as a worker reads them from the wire: a second decoder, for tests of the first encoder."""

import numpy as np

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


def column(raw: bytes) -> Int32Array:
    return np.array(
        [int.from_bytes(raw[i : i + 4], "little", signed=True) for i in range(0, len(raw), 4)],
        dtype=np.int32,
    )


def decode_plan(message: worker_pb2.StepPlan) -> StepPlan:
    """Return the plan of a message. What does not travel is 0."""
    return StepPlan(
        step_id=message.step_id,
        reset=message.reset,
        released_rows=column(message.released_rows),
        forked=tuple(
            ForkedRow(
                fork.row,
                fork.parent_row,
                fork.sequence_index,
                fork.last_token if fork.HasField("last_token") else None,
                fork.num_blocks,
            )
            for fork in message.forked
        ),
        admitted=tuple(_decode_row(row) for row in message.admitted),
        appended=tuple(
            AppendedBlocks(part.group, column(part.rows), column(part.blocks))
            for part in message.appended
        ),
        copy_sources=column(message.copy_sources),
        copy_destinations=column(message.copy_destinations),
        exception_rows=column(message.exception_rows),
        exception_num_computed_tokens=column(message.exception_num_computed_tokens),
        exception_num_new_tokens=column(message.exception_num_new_tokens),
        num_rows=0,
        num_tokens=0,
        num_preempted=0,
        serial_rows=column(message.serial_rows),
    )


def _decode_row(row: worker_pb2.AdmittedRow) -> AdmittedRow:
    sampling = row.sampling
    return AdmittedRow(
        row=row.row,
        request_id=row.request_id,
        tokens=column(row.tokens),
        num_prompt_tokens=row.num_prompt_tokens,
        num_computed_tokens=row.num_computed_tokens,
        num_new_tokens=row.num_new_tokens,
        block_tables=tuple(column(table) for table in row.block_tables),
        sampling=Sampling(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=sampling.seed,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty or 1.0,
            logit_bias=tuple(
                zip(
                    column(sampling.bias_token_ids).tolist(),
                    np.frombuffer(sampling.bias_values, dtype="<f4").tolist(),
                    strict=True,
                )
            ),
            allowed_token_ids=tuple(column(sampling.allowed_token_ids).tolist()),
            bad_words=tuple(tuple(column(word).tolist()) for word in sampling.bad_words),
        ),
        sequence_index=row.sequence_index,
        num_samples=max(1, row.num_samples),
        num_candidates=row.num_candidates,
        adapter=row.adapter,
        embeddings=tuple(_decode_span(span) for span in row.embeddings),
        logprobs=row.logprobs,
        prompt_logprobs=row.prompt_logprobs if row.HasField("prompt_logprobs") else None,
        pooling=Pooling(row.pooling) if row.pooled else None,
        min_output_tokens=sampling.min_tokens,
        stop_token_ids=frozenset(column(sampling.stop_token_ids).tolist()),
    )


def _decode_span(span: worker_pb2.EmbeddingSpanRow) -> EmbeddedSpan:
    """Return a span whose content id does not travel, with one position a vector of 8 bytes."""
    content = ContentSpan("", span.offset, max(1, len(span.embeddings) // 8))
    return EmbeddedSpan(content, span.embeddings, span.element_type)
