"""Messages about a server, as what the client returns."""

from pagemill.client.server_facts import (
    AbortResult,
    Load,
    ModelInfo,
    ServerInfo,
    StepTimes,
    Totals,
    WorkerGroupInfo,
    WorkerInfo,
)
from pagemill.v1 import control_pb2


def server_info(message: control_pb2.GetServerInfoResponse) -> ServerInfo:
    """Return a server's facts."""
    groups = tuple(
        WorkerGroupInfo(
            group.group,
            group.ready,
            group.epoch,
            group.num_blocks,
            tuple(
                WorkerInfo(worker.rank, worker.boot_id, worker.device, worker.dtype, worker.phase)
                for worker in group.workers
            ),
        )
        for group in message.groups
    )
    return ServerInfo(
        version=message.version,
        protocol_version=message.protocol_version,
        incarnation=message.incarnation,
        model_names=tuple(message.model_names),
        block_size=message.block_size,
        max_num_batched_tokens=message.max_num_batched_tokens,
        max_num_seqs=message.max_num_seqs,
        max_model_len=message.max_model_len,
        pipeline_depth=message.pipeline_depth,
        groups=groups,
    )


def model_info(message: control_pb2.GetModelInfoResponse) -> ModelInfo:
    """Return a model's facts."""
    return ModelInfo(
        model=message.model,
        architecture=message.architecture,
        vocab_size=message.vocab_size,
        max_model_len=message.max_model_len,
        eos_token_ids=tuple(message.eos_token_ids),
        has_chat_template=message.has_chat_template,
        fingerprint=message.fingerprint,
    )


def load(message: control_pb2.GetLoadResponse) -> Load:
    """Return a server's load."""
    totals, recent = message.totals, message.recent_steps
    return Load(
        running=message.running,
        waiting=message.waiting,
        used_blocks=message.used_blocks,
        idle_cached_blocks=message.idle_cached_blocks,
        free_blocks=message.free_blocks,
        total_blocks=message.total_blocks,
        waiting_tokens=message.waiting_tokens,
        totals=Totals(
            steps=totals.steps,
            prompt_tokens=totals.prompt_tokens,
            generation_tokens=totals.generation_tokens,
            prefix_queries=totals.prefix_queries,
            prefix_hits=totals.prefix_hits,
            preemptions=totals.preemptions,
            recomputed_tokens=totals.recomputed_tokens,
        ),
        recent_steps=StepTimes(
            steps=recent.steps,
            schedule_s=recent.schedule_s,
            encode_s=recent.encode_s,
            wire_s=recent.wire_s,
            worker_wait_s=recent.worker_wait_s,
            model_s=recent.model_s,
            emit_s=recent.emit_s,
            step_s=recent.step_s,
        )
        if message.HasField("recent_steps")
        else None,
        pinned_blocks=message.pinned_blocks,
    )


def abort_result(message: control_pb2.AbortResponse) -> AbortResult:
    """Return what an abort met."""
    return AbortResult(tuple(message.aborted), tuple(message.unknown))
