"""A server's start is told in parts that come from its own log."""

import runpy

import pytest

from source_tree import ROOT

SCRIPT = runpy.run_path(str(ROOT / "bench/start_up.py"))


def test_the_parts_are_those_that_the_worker_logs() -> None:
    log = 'a line\n{"event": "joined"}\n{"event": "started", "load_s": 0.5, "in_all_s": 2.0}\n'
    assert SCRIPT["parts_of"](log) == {"load_s": 0.5, "in_all_s": 2.0}
    assert SCRIPT["parts_of"]("event=started load_s=0.5\n") == {}


def test_a_tree_is_told_by_its_medians() -> None:
    runs = [{"ready_s": seconds, "load_s": 2 * seconds} for seconds in (1.0, 5.0, 2.0)]
    assert SCRIPT["summary"]("now", runs) == {
        "tree": "now", "runs": 3, "ready_s": 2.0, "load_s": 4.0,
        "ready_s_least": 1.0, "ready_s_most": 5.0,
    }  # fmt: skip


def test_a_server_that_does_not_come_up_is_an_error_with_its_words() -> None:
    with pytest.raises(RuntimeError, match="No such option"):
        SCRIPT["start_once"](ROOT, ["--no-such-flag"])
