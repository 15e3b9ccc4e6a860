"""Whoever waits is woken once when someone asks, however the two come together."""

from worker_svc.service.shutdown import Shutdown


def test_those_who_wait_are_woken_once() -> None:
    shutdown, woken = Shutdown(), []
    with shutdown.waking(lambda: woken.append("first")):
        with shutdown.waking(lambda: woken.append("gone")):
            pass
        assert not shutdown.wait(0)
        shutdown.ask()
        shutdown.ask()
    assert woken == ["first"]
    assert shutdown.wait(0)


def test_whoever_comes_to_wait_too_late_is_woken_at_once() -> None:
    shutdown, woken = Shutdown(), []
    shutdown.ask()
    with shutdown.waking(lambda: woken.append("late")):
        assert woken == ["late"]
