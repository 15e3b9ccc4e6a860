"""A draft is what followed the longest and latest match, and goes on as a repetition would."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.core.prompt_lookup import look_up


def drafted(tokens: list[int], count: int = 3) -> list[int]:
    found: list[int] = look_up(np.array(tokens, dtype=np.int32), count).tolist()
    return found


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4, 5, 1, 2], [3, 4, 5]),
        ([1, 2, 3, 9, 1, 2, 4, 9, 8, 1, 2], [4, 9, 8]),  # the latest
        ([7, 1, 2, 3, 9, 8, 1, 2, 4, 9, 7, 1, 2], [3, 9, 8]),  # the longest goes before it
        ([1, 2, 1, 2], [1, 2, 1]),
        ([5, 5, 5], [5, 5, 5]),
        ([1, 2, 3], []),
        ([1, 2], []),
        ([1], []),
        ([], []),
    ],
)
def test_what_followed_is_drafted(tokens: list[int], expected: list[int]) -> None:
    assert drafted(tokens) == expected


def naive(tokens: list[int], count: int) -> list[int]:
    for size in (4, 3, 2):
        for end in range(len(tokens) - 1, size - 1, -1):
            if size < len(tokens) and tokens[end - size : end] == tokens[-size:]:
                out = list(tokens)
                for place in range(count):
                    out.append(out[end + place])
                return out[len(tokens) :]
    return []


@given(tokens=st.lists(st.integers(0, 2), max_size=30), count=st.integers(0, 6))
def test_it_is_what_a_plain_search_finds(tokens: list[int], count: int) -> None:
    assert drafted(tokens, count) == naive(tokens, count)
