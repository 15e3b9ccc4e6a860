"""A submission into the request that the core queues."""

from scheduler_svc.core.block_hash import ExtraKeys
from scheduler_svc.core.request import Request, Stopping
from scheduler_svc.service.engine_door import Submission


def make_request(submission: Submission, weight: float) -> Request:
    """Return a request with its tenant's weight."""
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
        extra=ExtraKeys(salt=submission.salt, cache_domain=cache_domain(submission.tenant)),
        read_cache=submission.read_cache,
        priority=submission.priority,
        tenant=submission.tenant,
        weight=weight,
        arrival_ns=submission.arrival_ns,
        deadline_ns=submission.deadline_ns,
        num_sequences=submission.num_sequences,
        beam=submission.beam,
        reports=submission.reports,
    )


def cache_domain(tenant: str) -> bytes:
    """Return whose prefixes a tenant shares: its own."""
    return tenant.encode()
