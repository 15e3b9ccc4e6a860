"""Candidates are the head of a stable sort by likelihood, each row's for itself."""

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from worker_svc.runtime.candidates import find_candidates


def log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Work in float64, by the textbook."""
    shifted = logits.astype(np.float64) - logits.max()
    result: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return result


@given(
    counts=st.lists(st.integers(0, 12), min_size=1, max_size=5).filter(any),
    num_values=st.integers(1, 12),
    masked=st.sets(st.integers(0, 8)),
    seed=st.integers(0, 100),
)
def test_candidates_are_the_likeliest_and_the_lower_id_wins_a_tie(
    counts: list[int], num_values: int, masked: set[int], seed: int
) -> None:
    """Few values make many ties; with one, all ten tokens tie."""
    rng = np.random.default_rng(seed)
    logits = rng.integers(0, num_values, (len(counts), 10)).astype(np.float32) * np.float32(0.7)
    logits[:, sorted(masked)] = -np.inf
    found = find_candidates(torch.from_numpy(logits), np.array(counts))
    assert found.counts.tolist() == [min(count, 10) for count in counts]
    ids: list[int] = []
    logprobs: list[float] = []
    for row, count in enumerate(counts):
        best = sorted(range(10), key=lambda token: (-logits[row, token], token))[:count]
        ids += best
        logprobs += log_softmax(logits[row])[best].tolist()
    assert found.ids.tolist() == ids
    assert found.logprobs == pytest.approx(logprobs, abs=1e-5)
    assert found.ids.dtype == found.counts.dtype == np.dtype(np.int32)
    assert found.logprobs.dtype == np.dtype(np.float32)


def test_a_rows_candidates_do_not_depend_on_its_neighbours() -> None:
    logits = np.random.default_rng(1).normal(0, 3, (6, 5000)).astype(np.float32)
    together = find_candidates(torch.from_numpy(logits), np.array([0, 3, 8, 0, 1, 5000]))
    ends = np.cumsum(together.counts)
    for row in (1, 2, 4, 5):
        count = int(together.counts[row])
        alone = find_candidates(torch.from_numpy(logits[[row]]), np.array([count]))
        span = slice(int(ends[row]) - count, int(ends[row]))
        assert alone.ids.tolist() == together.ids[span].tolist()
        assert alone.logprobs.tolist() == together.logprobs[span].tolist()
