"""A terminal sees how far a replay is, one line, and nothing of it afterwards."""

from io import StringIO

from scheduler_svc.simulate.progress_bar import ProgressBar


def test_the_bar_is_drawn_once_a_hundredth_and_wiped() -> None:
    terminal = StringIO()
    bar = ProgressBar(terminal)
    for step in range(1001):
        bar.show(step / 1000)
    assert terminal.getvalue().count("\r") == 101
    assert "100 %" in terminal.getvalue()
    assert "\n" not in terminal.getvalue()
    bar.wipe()
    assert terminal.getvalue().endswith("\r\033[K")
