"""The numbers that bound every step."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the scheduler; the shell has checked that they fit together."""

    block_size: int
    """Tokens in a block."""

    max_num_seqs: int
    """Most requests in one step: the rows."""

    max_num_batched_tokens: int
    """Most tokens in one step."""

    max_model_len: int
    """Most tokens of a request, prompt and output."""

    max_waiting_requests: int
    """Most requests in the queue."""

    pipeline_depth: int
    """Plans in flight at most."""

    watermark: float = 0.03
    """Share of the pool that stays free when a preempted request resumes beside others. More
    saves tokens computed again, and leaves blocks unused (ADR 0015)."""

    max_waiting_tokens: int | None = None
    """Most known tokens in the queue. A request is taken whatever its size if nobody waits."""

    long_prefill_token_threshold: int = 0
    """Most tokens of one request in a step; who has more to compute is a long prefill. 0: no
    such bound."""

    max_long_prefills: int = 0
    """Most long prefills at once. 0: any number."""

    max_passes: int = 8
    """Most admissions past a waiting request that does not fit."""

    max_pass_ns: int = 1_000_000_000
    """How long others may pass it."""

    num_draft_tokens: int = 0
    """Most tokens that a row drafts for a step to verify. 0: none do."""

    @property
    def max_row_tokens(self) -> int:
        """Most tokens of one request in a step."""
        return self.long_prefill_token_threshold or self.max_num_batched_tokens

    @property
    def max_step_row_tokens(self) -> int:
        """Most tokens that one row can ever run in a step."""
        return min(self.max_row_tokens, self.max_num_batched_tokens)
