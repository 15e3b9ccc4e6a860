"""The log line of a request that ended."""

from structlog.typing import FilteringBoundLogger

from scheduler_svc.service.token_stream import RequestStream


def log_end(log: FilteringBoundLogger, stream: RequestStream) -> None:
    """Write what a request cost and how it ended; a warning if it could not be computed."""
    account, errors = stream.account(), stream.errors
    reasons = dict.fromkeys(reason.value for reason in stream.reasons if reason)
    write = log.warning if errors else log.info
    write(
        "request ended",
        request_id=stream.request.request_id,
        tenant=stream.request.tenant,
        reason=",".join(reasons),
        error="; ".join(errors),
        prompt_tokens=account.num_prompt_tokens,
        output_tokens=account.num_output_tokens,
        cached_tokens=account.num_cached_tokens,
        miss_reason=account.miss_reason.value if account.miss_reason else "",
        preemptions=account.num_preemptions,
        first_step=account.first_step_id,
        last_step=account.last_step_id,
    )
