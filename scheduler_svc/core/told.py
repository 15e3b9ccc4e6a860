"""What workers tell of tokens beside their ids: log-probabilities and pooled vectors."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.errors import InvariantError

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]

Vector = Float32Array
"""[hidden size] A pooled hidden state."""


class TokenTold(NamedTuple):
    """What is told of one sampled token, of the raw logits."""

    logprob: float
    """At most 0."""

    rank: int
    """1 is the likeliest."""

    ids: tuple[int, ...] = ()
    """The likeliest at its position, the likeliest first …"""

    logprobs: tuple[float, ...] = ()
    """… and their log-probabilities."""


class PromptPart(NamedTuple):
    """What is told of P neighbouring tokens of a prompt, with K candidates at each position."""

    row: int
    """Whose prompt."""

    offset: int
    """Position of the first, at least 1."""

    logprobs: Float32Array
    """[P] Of the prompt's own tokens."""

    ranks: Int32Array
    """[P]"""

    candidate_ids: Int32Array
    """[P, K] The likeliest first."""

    candidate_logprobs: Float32Array
    """[P, K]"""


class PromptTable:
    """What is told of a whole prompt, filled from the front as its chunks are computed.

    Nothing predicts the first token, so entry i is of the token at position i + 1. A prompt that
    is computed again, after a preemption, is told again: the same numbers, in the same places.
    """

    __slots__ = ("candidate_ids", "candidate_logprobs", "logprobs", "num_told", "ranks")

    def __init__(self, num_prompt_tokens: int, num_candidates: int) -> None:
        count = num_prompt_tokens - 1
        self.logprobs: Float32Array = np.zeros(count, dtype=np.float32)
        self.ranks: Int32Array = np.zeros(count, dtype=np.int32)
        self.candidate_ids: Int32Array = np.zeros((count, num_candidates), dtype=np.int32)
        self.candidate_logprobs: Float32Array = np.zeros((count, num_candidates), dtype=np.float32)
        self.num_told = 0

    @property
    def is_complete(self) -> bool:
        """All has come."""
        return self.num_told == len(self.logprobs)

    def add(self, part: PromptPart) -> None:
        """Take what a chunk told."""
        begin, end = part.offset - 1, part.offset - 1 + len(part.logprobs)
        if begin > self.num_told or end > len(self.logprobs):
            raise InvariantError(
                f"prompt positions from {part.offset} on are told behind {self.num_told}"
            )
        self.logprobs[begin:end] = part.logprobs
        self.ranks[begin:end] = part.ranks
        self.candidate_ids[begin:end] = part.candidate_ids
        self.candidate_logprobs[begin:end] = part.candidate_logprobs
        self.num_told = max(self.num_told, end)
