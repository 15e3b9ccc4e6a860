"""The search finds what its definition says, however its candidates are made."""

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scheduler_svc.core.beam_options import BeamOptions, EarlyStopping
from scheduler_svc.core.beam_search import BeamSearch
from scheduler_svc.core.request import FinishReason, Hypothesis, Stopping
from scheduler_svc.core.step_plan import Float32Array, Int32Array

Model = Callable[[tuple[int, ...]], Float32Array]
"""Log-probabilities of every next token."""


def random_model(seed: int, vocabulary: int) -> Model:
    def of(output: tuple[int, ...]) -> Float32Array:
        noise = np.random.default_rng([seed, *output])
        logits = noise.normal(0, 2, vocabulary).astype(np.float32)
        normalized: Float32Array = (logits - np.log(np.exp(logits).sum())).astype(np.float32)
        return normalized

    return of


def likeliest(logprobs: Float32Array, count: int) -> tuple[Int32Array, Float32Array]:
    ids = np.argsort(-logprobs, kind="stable")[:count].astype(np.int32)
    return ids, logprobs[ids]


def search(
    model: Model, options: BeamOptions, stopping: Stopping, max_output: int
) -> list[Hypothesis]:
    beams = BeamSearch(options, stopping, max_output)
    running: list[tuple[int, ...]] = [()]
    while not beams.done:
        going = beams.advance([likeliest(model(each), beams.num_candidates) for each in running])
        running = [(*running[parent], token) for parent, token in going]
    return beams.best()


def defined(
    model: Model, options: BeamOptions, stopping: Stopping, max_output: int
) -> list[tuple[float, tuple[int, ...]]]:
    """Return scores and outputs, the best first: the definition, over all tokens of all beams."""
    width, penalty = options.width, options.length_penalty
    stop_ids = stopping.eos_token_ids | stopping.stop_token_ids
    running: list[tuple[np.float32, tuple[int, ...]]] = [(np.float32(0), ())]
    finished: list[tuple[np.float32, tuple[int, ...]]] = []
    for length in range(1, max_output + 1):
        norm = np.float32(float(length) ** penalty)
        table = [
            (np.float32(logprob + score), (*output, token))
            for score, output in running
            for token, logprob in enumerate(model(output))
        ]
        table = sorted(table, key=lambda entry: -entry[0])  # stable: the lower place first

        def ends(output: tuple[int, ...], length: int = length) -> bool:
            stops = output[-1] in stop_ids and length >= stopping.min_output_tokens
            return stops or length == max_output

        finished += [(score / norm, out) for score, out in table[:width] if ends(out)]
        finished = sorted(finished, key=lambda entry: -entry[0])[:width]
        running = [entry for entry in table if not ends(entry[1])][:width]
        if not running:
            break
        is_full = len(finished) == width
        if is_full and options.early_stopping is EarlyStopping.YES:
            break
        hopeful = options.early_stopping is EarlyStopping.NEVER and penalty > 0
        at_best = np.float32(float(max_output if hopeful else length) ** penalty)
        if is_full and not running[0][0] / at_best > finished[-1][0]:
            break
    return [(float(score), output) for score, output in finished[: options.num_returned]]


@settings(deadline=None, max_examples=300)
@given(
    seed=st.integers(0, 2**32),
    vocabulary=st.integers(12, 24),
    width=st.integers(1, 4),
    penalty=st.sampled_from([0.0, 1.0, 2.0, -1.0, 0.5]),
    early=st.sampled_from(EarlyStopping),
    num_returned=st.integers(1, 4),
    eos=st.frozensets(st.integers(0, 11), max_size=2),
    stops=st.frozensets(st.integers(0, 11), max_size=1),
    max_output=st.integers(1, 7),
    min_output=st.integers(0, 4),
)
def test_the_search_finds_what_is_defined(
    seed: int,
    vocabulary: int,
    width: int,
    penalty: float,
    early: EarlyStopping,
    num_returned: int,
    eos: frozenset[int],
    stops: frozenset[int],
    max_output: int,
    min_output: int,
) -> None:
    options = BeamOptions(width, penalty, early, min(num_returned, width))
    stopping = Stopping(max_output, eos, stops, min_output)
    model = random_model(seed, vocabulary)
    found = search(model, options, stopping, max_output)
    assert [(h.score, h.tokens) for h in found] == defined(model, options, stopping, max_output)
    for each in found:
        parts = [model(each.tokens[:place])[token] for place, token in enumerate(each.tokens)]
        assert each.cumulative_logprob == float(np.add.accumulate(np.array(parts))[-1])
        stopped = each.tokens[-1] in eos | stops and len(each.tokens) >= min_output
        assert each.reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        assert each.stop_token_id == (
            each.tokens[-1] if stopped and each.tokens[-1] not in eos else None
        )


@given(seed=st.integers(0, 2**32))
def test_a_search_as_wide_as_the_tree_finds_the_best_of_all(seed: int) -> None:
    model = random_model(seed, 3)
    found = search(model, BeamOptions(27, 0.0, num_returned=5), Stopping(3), 3)

    def logprob(output: tuple[int, ...]) -> float:
        return sum(float(model(output[:place])[token]) for place, token in enumerate(output))

    best = sorted(product(range(3), repeat=3), key=logprob, reverse=True)[:5]
    assert [each.tokens for each in found] == best


@pytest.mark.filterwarnings("error")
@given(
    seed=st.integers(0, 2**32),
    penalty=st.floats(allow_nan=False, allow_infinity=False),
    early=st.sampled_from(EarlyStopping),
    eos=st.frozensets(st.integers(0, 11), max_size=2),
)
@example(seed=1, penalty=-30.0, early=EarlyStopping.NO, eos=frozenset())
@example(seed=1, penalty=-1e308, early=EarlyStopping.NEVER, eos=frozenset({3}))
@example(seed=1, penalty=1e308, early=EarlyStopping.YES, eos=frozenset({3}))
def test_any_length_penalty_gives_as_many_hypotheses_as_asked_for_with_finite_scores(
    seed: int, penalty: float, early: EarlyStopping, eos: frozenset[int]
) -> None:
    options = BeamOptions(3, penalty, early, num_returned=3)
    found = search(random_model(seed, 12), options, Stopping(20, eos), 20)
    assert len(found) == 3
    scores = [each.score for each in found]
    assert np.isfinite(scores).all()
    assert scores == sorted(scores, reverse=True)


def test_one_beam_is_the_greedy_choice() -> None:
    model = random_model(7, 20)
    output: tuple[int, ...] = ()
    for _ in range(6):
        output = (*output, int(model(output).argmax()))
    (found,) = search(model, BeamOptions(1), Stopping(6), 6)
    assert found.tokens == output
