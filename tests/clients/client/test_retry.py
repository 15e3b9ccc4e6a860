"""Pauses between tries grow, stay bounded, and never undercut what the server asked for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill.client.retry import RetryPolicy

POLICY = RetryPolicy(max_attempts=9, first_pause_s=0.1, max_pause_s=2.0)


@given(
    num_failed=st.integers(1, 1000),
    retry_after_s=st.none() | st.floats(0, 1e6),
    luck=st.floats(0, 1, exclude_max=True),
)
def test_a_pause_is_bounded_from_both_sides(
    num_failed: int, retry_after_s: float | None, luck: float
) -> None:
    pause_s = POLICY.pause_s(num_failed, retry_after_s, luck)
    assert pause_s >= (retry_after_s or 0)
    assert POLICY.first_pause_s / 2 <= pause_s
    assert pause_s <= max(POLICY.max_pause_s, retry_after_s or 0)


def test_pauses_double_from_try_to_try() -> None:
    assert [POLICY.pause_s(failed, None, 1.0) for failed in (1, 2, 3)] == [0.1, 0.2, 0.4]


@pytest.mark.parametrize("bad", [{"max_attempts": 0}, {"first_pause_s": -1}, {"max_pause_s": 0.01}])
def test_an_impossible_policy_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        RetryPolicy(**bad)  # type: ignore[arg-type] # the test's own table
