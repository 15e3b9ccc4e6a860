"""What live requests hold beside their tokens, each kind within a bound over all of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from scheduler_svc.core.errors import QueueFullError
from scheduler_svc.service.embedding_reading import EmbeddingRoom
from scheduler_svc.service.engine_door import Submission

MAX_TOLD_BYTES: Final = 2 << 30
"""Of told prompts. The largest answer that a request may have is half of it."""

# As messages, which they are until their stream ends: measured, 64-bit, protobuf 7.
_POSITION_BYTES: Final = 1024
_CANDIDATE_BYTES: Final = 128


class HeldBytes:
    """Bytes that live requests hold together."""

    def __init__(self, max_embedding_bytes: int, max_told_bytes: int = MAX_TOLD_BYTES) -> None:
        self._embeddings = EmbeddingRoom(max_embedding_bytes)
        self._max_told_bytes = max_told_bytes
        self._told_bytes = 0

    @contextmanager
    def of(self, submission: Submission) -> Iterator[None]:
        """Count what a request holds while the block lasts.

        Raises: QueueFullError if there is no room; InvalidRequestError if there never is.
        """
        with self._embeddings.holding(submission.embeddings), self._telling(submission):
            yield

    @contextmanager
    def _telling(self, submission: Submission) -> Iterator[None]:
        num_bytes, held, most = told_bytes(submission), self._told_bytes, self._max_told_bytes
        # One alone is bounded by what an answer may tell.
        if num_bytes and held and held + num_bytes > most:
            raise QueueFullError(
                f"live requests have {held} bytes of prompt log-probabilities, with the "
                f"{num_bytes} of this one they would be more than {most}"
            )
        self._told_bytes += num_bytes
        try:
            yield
        finally:
            self._told_bytes -= num_bytes


def told_bytes(submission: Submission) -> int:
    """Return the bytes of what a request has told of its prompt, at most."""
    num_candidates = submission.reports.prompt_logprobs
    if num_candidates is None:
        return 0
    return len(submission.token_ids) * (_POSITION_BYTES + num_candidates * _CANDIDATE_BYTES)
