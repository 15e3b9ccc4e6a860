"""Delays double from 0.1 s to 5 s, and are spread."""

import pytest

from worker_svc.service.backoff import Backoff


def test_delays_double_up_to_a_bound_and_begin_again_after_a_reset() -> None:
    backoff = Backoff(lambda: 0.0)
    delays = [backoff.next_delay_s() for _ in range(9)]
    assert delays == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0])
    backoff.reset()
    assert backoff.next_delay_s() == pytest.approx(0.1)


def test_chance_halves_a_delay_at_most() -> None:
    assert Backoff(lambda: 0.9999).next_delay_s() == pytest.approx(0.05, rel=1e-3)
