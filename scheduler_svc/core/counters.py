"""What has happened since start, as plain numbers the shell reads."""

from dataclasses import dataclass, field

from scheduler_svc.core.miss_reason import MissReason


@dataclass(slots=True)
class Counters:
    """Totals since start. They only grow."""

    steps: int = 0
    """Results applied."""

    prompt_tokens: int = 0
    """Prompt tokens of admitted requests, each request once."""

    generation_tokens: int = 0
    """Tokens sampled for live requests."""

    prefix_queries: int = 0
    """Tokens looked up in the prefix cache, at first admission only."""

    prefix_hits: int = 0
    """Of these, tokens found."""

    prefix_misses: dict[MissReason, int] = field(default_factory=dict)
    """Of these, tokens not found, by what ended the hit. Queries are hits and misses."""

    preemptions: int = 0
    """Requests that lost their blocks, each time."""

    draft_tokens: int = 0
    """Tokens drafted and verified."""

    accepted_draft_tokens: int = 0
    """Of these, tokens that the model said."""

    recomputed_tokens: int = 0
    """Tokens computed a second time after preemptions."""

    pauses: int = 0
    """Rows that needed a block and did not run for a step, each step."""
