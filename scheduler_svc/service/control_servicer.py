"""The RPCs of pagemill.v1.Control. Those it lacks are not served yet."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from pagemill.v1.control_pb2 import (
    AbortRequest,
    AbortResponse,
    GetLoadRequest,
    GetLoadResponse,
    GetModelInfoRequest,
    GetModelInfoResponse,
    GetServerInfoRequest,
    GetServerInfoResponse,
    GetTokenizerRequest,
    GetTokenizerResponse,
    StepTimes,
    SubscribeKvEventsRequest,
    SubscribeKvEventsResponse,
    Totals,
    WorkerGroupInfo,
    WorkerInfo,
)
from scheduler_svc.core.errors import InvalidRequestError, RequestError
from scheduler_svc.service.engine_door import EngineDoor
from scheduler_svc.service.field_bounds import check_tenant
from scheduler_svc.service.front_end import FrontEnd
from scheduler_svc.service.kv_event_feed import KvEventFeed
from scheduler_svc.service.kv_event_messages import to_message
from scheduler_svc.service.rpc_handlers import Context
from scheduler_svc.service.server_state import GroupState
from scheduler_svc.service.status import UnknownRequestError
from scheduler_svc.service.tokenizer_archive import TokenizerArchive

_MAX_ABORTS = 10_000
_CHUNK_BYTES = 1 << 20


class ControlServicer:
    """Looking at the server, and stopping single requests. Methods raise RequestError."""

    def __init__(self, door: EngineDoor, front: FrontEnd, feed: KvEventFeed | None = None) -> None:
        """Without `feed`, events are off."""
        self._door = door
        self._feed = feed
        self._front = front
        self._archive = TokenizerArchive(front.facts)

    async def GetServerInfo(
        self, _request: GetServerInfoRequest, _context: Context
    ) -> GetServerInfoResponse:
        """Say what the server is and how it is set."""
        front, state = self._front, self._door.server_state()
        limits = front.limits
        return GetServerInfoResponse(
            version=front.version,
            protocol_version=front.protocol_version,
            incarnation=state.incarnation,
            model_names=front.served_names,
            block_size=limits.block_size,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_num_seqs=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            pipeline_depth=limits.pipeline_depth,
            groups=[_group_info(group) for group in state.groups],
        )

    async def GetModelInfo(
        self, request: GetModelInfoRequest, _context: Context
    ) -> GetModelInfoResponse:
        """Say what the served model is."""
        front, facts = self._front, self._front.facts
        groups = self._door.server_state().groups
        return GetModelInfoResponse(
            model=front.model_name(request.model),
            architecture=facts.architecture,
            vocab_size=facts.vocab_size,
            max_model_len=front.limits.max_model_len,
            eos_token_ids=sorted(facts.eos_token_ids),
            has_chat_template=facts.chat_template is not None,
            fingerprint=next((group.fingerprint for group in groups if group.fingerprint), ""),
        )

    async def GetLoad(self, _request: GetLoadRequest, _context: Context) -> GetLoadResponse:
        """Say how busy the server is, and where its recent steps spent their time."""
        load = self._door.load()
        totals, recent = load.totals, load.recent
        response = GetLoadResponse(
            running=load.running,
            waiting=load.waiting,
            used_blocks=load.used_blocks,
            idle_cached_blocks=load.idle_cached_blocks,
            free_blocks=load.free_blocks,
            total_blocks=load.total_blocks,
            waiting_tokens=load.waiting_tokens,
            pinned_blocks=load.cache.pinned_blocks,
            totals=Totals(
                steps=totals.steps,
                prompt_tokens=totals.prompt_tokens,
                generation_tokens=totals.generation_tokens,
                prefix_queries=totals.prefix_queries,
                prefix_hits=totals.prefix_hits,
                preemptions=totals.preemptions,
                recomputed_tokens=totals.recomputed_tokens,
            ),
        )
        if recent is not None:
            response.recent_steps.CopyFrom(
                StepTimes(
                    steps=recent.steps,
                    schedule_s=recent.schedule_s,
                    encode_s=recent.encode_s,
                    wire_s=recent.wire_s,
                    worker_wait_s=recent.worker_wait_s,
                    model_s=recent.model_s,
                    emit_s=recent.emit_s,
                    step_s=recent.step_s,
                )
            )
        return response

    async def GetTokenizer(
        self, request: GetTokenizerRequest, _context: Context
    ) -> AsyncGenerator[GetTokenizerResponse, None]:
        """Stream a zip of the tokenizer's files."""
        self._front.model_name(request.model)
        content, sha256 = await self._archive.content()
        for start in range(0, len(content), _CHUNK_BYTES):
            end = start + _CHUNK_BYTES
            yield GetTokenizerResponse(
                chunk=content[start:end], sha256=sha256 if end >= len(content) else ""
            )

    async def SubscribeKvEvents(
        self, request: SubscribeKvEventsRequest, _context: Context
    ) -> AsyncGenerator[SubscribeKvEventsResponse, None]:
        """Stream changes of the prefix cache, as long as the call lasts."""
        if self._feed is None:
            raise RequestError("KV events are off: see enable_kv_cache_events")
        start = request.from_sequence if request.HasField("from_sequence") else None
        async with aclosing(self._feed.follow(start)) as batches:
            async for batch in batches:
                yield to_message(batch)

    async def Abort(self, request: AbortRequest, _context: Context) -> AbortResponse:
        """End live requests of a tenant, or all there are."""
        if request.all_tenants:
            return AbortResponse(aborted=self._door.abort_everyone())
        if not request.all and not 1 <= len(request.request_ids) <= _MAX_ABORTS:
            raise InvalidRequestError(
                "request_ids",
                f"request_ids has {len(request.request_ids)} ids, must have 1 to {_MAX_ABORTS}",
            )
        check_tenant(request.tenant)
        wanted = None if request.all else list(request.request_ids)
        aborted, unknown = self._door.abort(request.tenant, wanted)
        if not aborted and not request.all:
            raise UnknownRequestError(f"none of the {len(unknown)} request_ids is live")
        return AbortResponse(aborted=aborted, unknown=unknown)


def _group_info(group: GroupState) -> WorkerGroupInfo:
    return WorkerGroupInfo(
        group=group.number,
        ready=group.ready,
        epoch=group.epoch,
        num_blocks=group.num_blocks,
        workers=[
            WorkerInfo(
                rank=worker.rank,
                boot_id=worker.boot_id,
                device=worker.device,
                dtype=worker.dtype,
                phase=worker.phase,
            )
            for worker in group.workers
        ],
    )
