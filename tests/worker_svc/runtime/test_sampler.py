"""Samples follow the distribution asked for, and depend on nothing but the row's own numbers."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from worker_svc.runtime.sampler import GREEDY_TEMPERATURE, sample, sample_several, uniforms
from worker_svc.runtime.sampling_columns import SamplingColumns
from worker_svc.runtime.step_plan import AdmittedRow, SamplingParams, no_int32

NAN, INF = float("nan"), float("inf")


def draw(
    logits: npt.NDArray[np.float32],
    params: SamplingParams | list[SamplingParams],
    *,
    positions: list[int] | None = None,
    rows: list[int] | None = None,
) -> list[int]:
    """Sample from each row of logits, with seeds as given."""
    count = len(logits)
    each = params if isinstance(params, list) else [params] * count
    rows = rows or list(range(count))
    columns = SamplingColumns(max(rows) + 1)
    for row, one in zip(rows, each, strict=True):
        columns.write(row, AdmittedRow(row, "r", no_int32(), 0, 0, 0, (), one))
    tokens, failed = sample(
        torch.from_numpy(logits),
        np.array(rows),
        np.array(positions or [0] * count, dtype=np.int32),
        columns,
    )
    assert not failed.any()
    return [int(token) for token in tokens]


def draw_many(
    logits: npt.NDArray[np.float32], count: int = 4000, **params: Any
) -> npt.NDArray[np.float64]:
    """Return the share of each token among those drawn at positions from 0 to `count`."""
    one = SamplingParams(**{"temperature": 1.0, "seed": 7, **params})
    tokens = draw(np.tile(logits, (count, 1)), one, positions=list(range(count)))
    shares: npt.NDArray[np.float64] = np.bincount(tokens, minlength=len(logits)) / count
    return shares


def softmax(scaled: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    weights = np.exp(scaled - scaled.max())
    probabilities: npt.NDArray[np.float64] = weights / weights.sum()
    return probabilities


def filtered(
    logits: npt.NDArray[np.float32],
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> npt.NDArray[np.float64]:
    """Return each token's probability, by the textbook: min_p, then top_k, then top_p."""
    probabilities = softmax(logits.astype(np.float64) / temperature)
    probabilities[probabilities < min_p * probabilities.max() * (1 - 1e-6)] = 0
    order = np.lexsort((np.arange(len(logits)), -logits))
    if top_k:
        probabilities[order[top_k:]] = 0
    probabilities /= probabilities.sum()
    before = np.cumsum(probabilities[order]) - probabilities[order]
    probabilities[order[before >= top_p]] = 0
    probabilities /= probabilities.sum()
    return probabilities


LOGITS = np.random.default_rng(3).normal(0, 2, 50).astype(np.float32)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.3},
        {"temperature": 5.0},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 1.0, "top_k": 500},
        {"temperature": 1.0, "top_p": 0.6},
        {"temperature": 1.5, "min_p": 0.1},
        {"temperature": 1.2, "top_k": 10, "top_p": 0.8},
        {"temperature": 1.2, "top_k": 10, "top_p": 0.8, "min_p": 0.2},
    ],
)
def test_tokens_are_drawn_as_often_as_they_are_probable(params: dict[str, Any]) -> None:
    found = draw_many(LOGITS, **params)
    expected = filtered(LOGITS, **params)
    assert not found[expected == 0].any()
    likely = expected > 0
    chi_square = 4000 * ((found - expected)[likely] ** 2 / expected[likely]).sum()
    degrees = likely.sum() - 1
    # Five standard deviations; the seed is fixed, so this holds or it does not.
    assert chi_square < degrees + 5 * np.sqrt(2 * max(degrees, 1))


def test_unlikely_tokens_of_a_long_tail_are_drawn_too() -> None:
    """Their draw takes the way past the few that are ranked at first."""
    logits = np.full(5000, -10.5, dtype=np.float32)
    logits[1234] = 0.0
    found = draw_many(logits)
    expected = 1 - filtered(logits, 1.0)[1234]
    assert 0.1 < expected < 0.2
    assert 1 - found[1234] == pytest.approx(expected, abs=5 * np.sqrt(expected / 4000))
    assert (found > 0).sum() > 400


def test_filters_reach_into_the_tail_as_well() -> None:
    logits = np.full(5000, -10.5, dtype=np.float32)
    logits[1234] = 0.0
    cases: list[dict[str, Any]] = [{"top_k": 100}, {"top_p": 0.95}, {"top_k": 2000, "top_p": 0.999}]
    for params in cases:
        expected = filtered(logits, 1.0, **params)
        found = draw_many(logits, 1000, **params)
        assert not found[expected == 0].any()
        share = expected[1234]
        assert found[1234] == pytest.approx(share, abs=5 * np.sqrt(share * (1 - share) / 1000))


def test_the_lower_id_wins_a_tie() -> None:
    logits = np.zeros((1, 100), dtype=np.float32)
    logits[0, [30, 60]] = 5.0
    assert draw(logits, SamplingParams()) == [30]
    assert draw(logits, SamplingParams(temperature=1.0, top_k=1)) == [30]
    assert draw(logits, SamplingParams(temperature=1.0, top_p=1e-9)) == [30]


@pytest.mark.parametrize("temperature", [0.0, 1e-10, 1e-6, GREEDY_TEMPERATURE])
def test_tiny_temperatures_take_the_most_likely(temperature: float) -> None:
    logits = np.random.default_rng(0).normal(0, 1e4, (20, 300)).astype(np.float32)
    logits[:, 5] = logits.max(axis=1)
    params = [SamplingParams(temperature=temperature, seed=i) for i in range(20)]
    assert draw(logits, params) == [5] * 20


def test_low_temperatures_on_large_logits_stay_finite() -> None:
    logits = np.random.default_rng(0).normal(0, 1e4, (20, 300)).astype(np.float32)
    params = [SamplingParams(temperature=0.01, seed=i) for i in range(20)]
    assert draw(logits, params) == logits.argmax(axis=1).tolist()


@given(
    seed=st.integers(0, 2**64 - 1),
    neighbours=st.lists(st.sampled_from([0.0, 0.7, 2.0]), max_size=5),
    place=st.integers(0, 5),
    position=st.integers(0, 2**31 - 1),
)
def test_a_rows_token_does_not_depend_on_its_neighbours(
    seed: int, neighbours: list[float], place: int, position: int
) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=seed)
    alone = draw(LOGITS[None], params, positions=[position])
    others = [SamplingParams(temperature=temperature, seed=1) for temperature in neighbours]
    place = min(place, len(others))
    others.insert(place, params)
    logits = np.random.default_rng(seed % 100).normal(0, 3, (len(others), 50)).astype(np.float32)
    logits[place] = LOGITS
    positions = [3] * len(others)
    positions[place] = position
    rows = [2 * i + 1 for i in range(len(others))]
    assert draw(logits, others, positions=positions, rows=rows)[place] == alone[0]


@given(
    counts=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    temperatures=st.lists(st.sampled_from([0.0, 0.7, 2.0]), min_size=5, max_size=5),
    index=st.integers(0, 2**32 - 1),
    position=st.integers(0, 2**31 - 10),
)
def test_several_tokens_of_a_row_are_those_of_as_many_rows(
    counts: list[int], temperatures: list[float], index: int, position: int
) -> None:
    """The rows stand at odd places, so that a row and its place in the step are not the same."""
    logits = np.random.default_rng(len(counts)).normal(0, 3, (len(counts), 50)).astype(np.float32)
    columns = SamplingColumns(2 * len(counts))
    rows = np.arange(len(counts)) * 2 + 1
    alone: list[int] = []
    for place, (row, count) in enumerate(zip(rows.tolist(), counts, strict=True)):
        params = SamplingParams(temperature=temperatures[place], top_p=0.9, seed=place)
        for nth in range(count):
            one = AdmittedRow(0, "r", no_int32(), 0, 0, 0, (), params, index + nth)
            single = SamplingColumns(1)
            single.write(0, one)
            positions = np.array([position + place], dtype=np.int32)
            token, _ = sample(torch.from_numpy(logits[[place]]), np.array([0]), positions, single)
            alone.append(int(token[0]))
        entry = AdmittedRow(row, "r", no_int32(), 0, 0, 0, (), params, index, num_samples=count)
        columns.write(row, entry)
    positions = (position + np.arange(len(counts))).astype(np.int32)
    tensor = torch.from_numpy(logits)
    first, _ = sample(tensor, rows, positions, columns)
    tokens, num_tokens = sample_several(tensor, first, rows, positions, columns)
    assert num_tokens.tolist() == counts
    assert tokens.tolist() == alone
    assert tokens.dtype == num_tokens.dtype == np.dtype(np.int32)


def test_a_masked_token_is_never_drawn() -> None:
    logits = LOGITS.copy()
    logits[::2] = -INF
    assert not draw_many(logits)[::2].any()


@pytest.mark.parametrize("bad", [NAN, INF])
def test_logits_that_are_no_numbers_fail_their_row_only(bad: float) -> None:
    logits = np.tile(LOGITS, (4, 1))
    logits[1, 17] = bad
    logits[2] = -INF
    columns = SamplingColumns(4)
    columns.temperature[:] = [0.0, 1.0, 0.0, 1.0]
    _, failed = sample(torch.from_numpy(logits), np.arange(4), np.zeros(4, dtype=np.int32), columns)
    assert failed.tolist() == [False, True, True, False]


def test_draws_are_even_and_independent_in_each_argument() -> None:
    count = 20000
    numbers = np.arange(count)
    zeros = np.zeros(count, dtype=np.int64)
    by_argument = [
        uniforms(numbers.astype(np.uint64), zeros, zeros.astype(np.int32)),
        uniforms(zeros.astype(np.uint64), numbers, zeros.astype(np.int32)),
        uniforms(zeros.astype(np.uint64), zeros, numbers.astype(np.int32)),
        # Seeds that differ in high bits only, as times do in low ones.
        uniforms(numbers.astype(np.uint64) << np.uint64(45), zeros, zeros.astype(np.int32)),
    ]
    for draws in by_argument:
        assert draws.min() >= 0
        assert draws.max() < 1
        counts = np.histogram(draws, bins=100, range=(0, 1))[0]
        chi_square = ((counts - count / 100) ** 2 / (count / 100)).sum()
        assert chi_square < 99 + 5 * np.sqrt(2 * 99)
        for lag in (1, 2, 16):
            assert abs(np.corrcoef(draws[lag:], draws[:-lag])[0, 1]) < 5 / np.sqrt(count)
    for first in range(3):
        for second in range(first):
            pair = by_argument[first][1:], by_argument[second][1:]
            assert abs(np.corrcoef(*pair)[0, 1]) < 5 / np.sqrt(count)


def test_draws_stay_what_they_are() -> None:
    """Recorded requests replay only as long as this function does not change."""
    seeds = np.array([0, 42, 2**64 - 1], dtype=np.uint64)
    found = uniforms(seeds, np.array([0, 1, 2]), np.array([0, 1, 2], dtype=np.int32))
    assert found.tolist() == [by_hand(0, 0, 0), by_hand(42, 1, 1), by_hand(2**64 - 1, 2, 2)]
    assert found.tolist() == [0.13870941014555427, 0.3397220955490139, 0.45489724234761586]


def by_hand(*words: int) -> float:
    """Hash with integers of any size."""
    mixed, ones = 0, 2**64 - 1
    for word in words:
        mixed = ((mixed ^ word) + 0x9E3779B97F4A7C15) & ones
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & ones
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & ones
        mixed ^= mixed >> 31
    return (mixed >> 11) / 2**53
