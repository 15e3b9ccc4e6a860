"""Each part of a start is told in seconds, and together they are the whole."""

from worker_svc.service.start_clock import StartClock


def test_parts_follow_one_another_and_add_up() -> None:
    times = iter([11.5, 12.0, 15.0, 15.25])
    clock = StartClock(10.0, lambda: next(times))
    for part in ("import", "dial", "load", "dial"):
        clock.ended(part)
    assert clock.seconds() == {"import_s": 1.5, "dial_s": 0.75, "load_s": 3.0, "in_all_s": 5.25}
