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

    watermark: float = 0.01
    """Share of the pool that stays free when a preempted request resumes beside others."""
