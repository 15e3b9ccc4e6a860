"""What the fake worker tells beside tokens: numbers that follow from histories, as tokens do."""

from collections.abc import Sequence

import numpy as np

from scheduler_svc.core.reports import Pooling
from scheduler_svc.core.told import PromptPart, TokenTold

DIM = 3


def told_of(history: int, token: int) -> tuple[float, int]:
    """Return log-probability and rank of a token behind a history."""
    mixed = hash((history, token, "told"))
    return -(mixed % 64) / 8, 1 + mixed % 5


def candidates_of(history: int, count: int) -> tuple[list[int], list[float]]:
    """Return so many candidates behind a history, with their log-probabilities."""
    ids = [hash((history, nth)) % 9 for nth in range(count)]
    return ids, [-float(nth) / 4 for nth in range(count)]


def token_told(history: int, token: int, count: int) -> TokenTold:
    """Return all that is told of a token: the oracle."""
    ids, logprobs = candidates_of(history, count)
    return TokenTold(*told_of(history, token), tuple(ids), tuple(logprobs))


def prompt_part(
    row: int, begin: int, histories: list[int], tokens: list[int], k: int
) -> PromptPart:
    """Return what is told of tokens behind histories, the first of which stands at `begin`."""
    told = [told_of(*pair) for pair in zip(histories, tokens, strict=True)]
    best = [candidates_of(history, k) for history in histories]
    shape = (len(tokens), k)
    return PromptPart(
        row,
        begin,
        np.array([logprob for logprob, _ in told], dtype=np.float32),
        np.array([rank for _, rank in told], dtype=np.int32),
        np.array([ids for ids, _ in best], dtype=np.int32).reshape(shape),
        np.array([logprobs for _, logprobs in best], dtype=np.float32).reshape(shape),
    )


def state_of(history: int) -> list[float]:
    """Return the hidden state behind a history."""
    return [float(hash((history, place)) % 16) for place in range(DIM)]


def pooled(histories: Sequence[int], kind: Pooling) -> list[float]:
    """Return the vector of a row with these histories, one for each token."""
    states = np.array([state_of(history) for history in histories])
    vector: list[float] = (states[-1] if kind is Pooling.LAST else states.sum(axis=0)).tolist()
    return vector
