"""Whether a token is a request's last."""

from scheduler_svc.core.request import FinishReason, Request


def reason_to_end(request: Request, token: int) -> FinishReason | None:
    """Return why a request without a row ends with the token just appended, or None."""
    stopping = request.stopping
    stopped = token in stopping.eos_token_ids or token in stopping.stop_token_ids
    if stopped and request.num_output_tokens >= stopping.min_output_tokens:
        return FinishReason.STOP
    return FinishReason.LENGTH if request.num_tokens >= request.limit else None


def note_stop_id(request: Request, token: int, reason: FinishReason) -> None:
    """Remember the stop id that ended a request, unless it is the model's own end of sequence."""
    if reason is FinishReason.STOP and token not in request.stopping.eos_token_ids:
        request.stop_token_id = token
