"""A scheduler that is stopped before it can drain just ends."""

import signal

from interrupted_start import interrupted


def test_ctrl_c_while_it_imports_ends_it_without_a_word() -> None:
    program = "from scheduler_svc.__main__ import main; main()"
    assert interrupted(program, "scheduler_svc.config") == (-signal.SIGINT, "", "")
