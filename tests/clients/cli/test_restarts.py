"""A worker is started again some times in a row, later each time, and not if it is hopeless."""

import pytest

from pagemill.cli.restarts import Restarts


def test_pauses_grow_and_end() -> None:
    restarts = Restarts()
    assert [restarts.pause_s(1, ran_s=1.0) for _ in range(6)] == [0.5, 1, 2, 4, 8, None]


def test_a_worker_that_ran_a_while_has_all_its_starts_again() -> None:
    restarts = Restarts()
    for _ in range(5):
        restarts.pause_s(137, ran_s=1.0)
    assert restarts.pause_s(137, ran_s=61.0) == 0.5


@pytest.mark.parametrize("status", [2, 3])
def test_a_hopeless_worker_is_not_started_again(status: int) -> None:
    assert Restarts().pause_s(status, ran_s=1e6) is None
