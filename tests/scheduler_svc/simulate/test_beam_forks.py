"""The core's search, given the candidates of a replay, takes the recorded parents and no others."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.core.beam_options import BeamOptions
from scheduler_svc.core.beam_search import BeamSearch, Continuation
from scheduler_svc.core.request import Stopping
from scheduler_svc.simulate.beam_forks import (
    BEAM_WIDTHS,
    Parents,
    candidates,
    parents_at,
    read_parents,
)

FIRST_TOKEN = 2**30


def follow(parents: Parents, count: int) -> None:
    width = parents.shape[1]
    search = BeamSearch(BeamOptions(width), Stopping(max_output_tokens=count), count)
    lanes = [0]
    for step in range(count):
        wanted = parents_at(parents, step)
        going = search.advance([candidates(wanted, beam, FIRST_TOKEN) for beam in lanes])
        if step + 1 < count:
            assert going == [
                Continuation(int(parent), FIRST_TOKEN + beam) for beam, parent in enumerate(wanted)
            ]
        lanes = [token - FIRST_TOKEN for _, token in going]
    assert search.done
    assert len(search.best()[0].tokens) == count


@settings(deadline=None, max_examples=100)
@given(
    width=st.integers(1, 6),
    num_steps=st.integers(2, 12),
    chance=st.randoms(use_true_random=False),
)
def test_any_search_is_followed(width: int, num_steps: int, chance: random.Random) -> None:
    later = [[chance.randrange(width) for _ in range(width)] for _ in range(num_steps - 1)]
    follow(np.array([[0] * width, *later], dtype=np.uint8), 2 * num_steps + 3)


@pytest.mark.parametrize("width", BEAM_WIDTHS)
def test_the_recorded_searches_are_followed_to_the_longest_output(width: int) -> None:
    searches = read_parents(width)
    assert searches.dtype == np.uint8
    assert searches.shape[2] == width
    assert searches.max() == width - 1
    assert not searches[:, 0].any()
    follow(searches[0], 1024)


def test_a_search_that_is_too_short_goes_round_without_its_first_step() -> None:
    parents = np.array([[0, 0], [1, 0], [1, 1], [0, 1]], dtype=np.uint8)
    walk = [parents_at(parents, step).tolist() for step in range(8)]
    assert walk == [[0, 0], *(2 * [[1, 0], [1, 1], [0, 1]]), [1, 0]]
