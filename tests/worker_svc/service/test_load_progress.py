"""Loading says how far it is: by a bar on a terminal, in a log only if it takes long."""

import io

from worker_svc.service.load_progress import LOG_S, LoadProgress
from worker_svc.service.logs import make_logger


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_terminal_has_a_bar_that_goes_when_it_is_full() -> None:
    terminal, clock = Terminal(), Clock()
    progress = LoadProgress(terminal, make_logger(io.StringIO(), "text", "info"), clock)
    for done in range(1, 9):
        clock.now_s += 0.06
        progress(done, 8)
    drawn = terminal.getvalue().split("\r")
    assert drawn[1] == f"loading weights [{'#' * 10}{'.' * 30}] 2/8 tensors"
    assert [text.split("] ")[1] for text in drawn[1:-1]] == [f"{n}/8 tensors" for n in (2, 4, 6)]
    assert drawn[-1] == "\x1b[K"


def test_a_log_has_a_line_every_few_seconds() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = LoadProgress(io.StringIO(), make_logger(stream, "text", "info"), clock)
    for done in range(1, 12):
        clock.now_s += LOG_S / 4
        progress(done, 12)
    lines = stream.getvalue().splitlines()
    assert [("tensors=4 of=12" in line, "tensors=8 of=12" in line) for line in lines] == [
        (True, False),
        (False, True),
    ]
