"""KV events as messages of pagemill.v1.Control."""

from pagemill.v1.control_pb2 import (
    BlocksRemoved,
    BlocksStored,
    KvEvent,
    SubscribeKvEventsResponse,
)
from scheduler_svc.core import kv_events
from scheduler_svc.service.kv_event_feed import KvEventBatch

_MEDIUM = "device"


def to_message(batch: KvEventBatch) -> SubscribeKvEventsResponse:
    """Return the message of a batch."""
    return SubscribeKvEventsResponse(
        sequence=batch.number,
        events=[_event(event) for event in batch.events],
        snapshot=batch.snapshot,
    )


def _event(event: kv_events.KvEvent) -> KvEvent:
    match event:
        case kv_events.BlocksStored():
            stored = BlocksStored(
                block_hashes=event.names,
                parent_hash=event.parent,
                token_ids=event.token_ids,
                block_size=event.block_size,
                adapter=event.adapter,
            )
            return KvEvent(medium=_MEDIUM, group=event.group, stored=stored)
        case kv_events.BlockRemoved():
            removed = BlocksRemoved(block_hashes=[event.name])
            return KvEvent(medium=_MEDIUM, group=event.group, removed=removed)
        case kv_events.CacheCleared():
            return KvEvent(medium=_MEDIUM, cleared=True)
