"""A submission into the request that the core queues."""

from scheduler_svc.core.block_hash import Adapter, ExtraKeys
from scheduler_svc.core.request import Request, Stopping
from scheduler_svc.service.adapter_desk import LoadedAdapter
from scheduler_svc.service.engine_door import Submission


def make_request(
    submission: Submission, weight: float, adapter: LoadedAdapter | None = None
) -> Request:
    """Return a request with its tenant's weight and its adapter."""
    extra = ExtraKeys(
        salt=submission.salt,
        cache_domain=cache_domain(submission.tenant),
        adapter=Adapter(adapter.name, adapter.generation) if adapter else None,
        spans=tuple(span.content for span in submission.embeddings),
    )
    return Request(
        submission.request_id,
        submission.token_ids,
        submission.sampling,
        Stopping(
            max_output_tokens=submission.max_output_tokens,
            eos_token_ids=submission.eos_token_ids,
            stop_token_ids=submission.stop_token_ids,
            min_output_tokens=submission.min_output_tokens,
        ),
        extra=extra,
        read_cache=submission.read_cache,
        priority=submission.priority,
        tenant=submission.tenant,
        weight=weight,
        arrival_ns=submission.arrival_ns,
        deadline_ns=submission.deadline_ns,
        num_sequences=submission.num_sequences,
        beam=submission.beam,
        adapter_slot=adapter.slot if adapter else 0,
        embeddings=submission.embeddings,
        reports=submission.reports,
    )


def cache_domain(tenant: str) -> bytes:
    """Return whose prefixes a tenant shares: its own."""
    return tenant.encode()
