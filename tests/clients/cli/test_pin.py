"""`pin` prints what names the pin, and `unpin` takes it."""

import sys
from collections.abc import Callable

import pytest

from pagemill.cli import command
from scripted_server import ScriptedServer

Run = Callable[..., int]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a runner of `pagemill`, which returns the exit status."""

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["pagemill", *arguments])
        with pytest.raises(SystemExit) as caught:
            command.main()
        assert isinstance(caught.value.code, int)
        return caught.value.code

    return run


def test_a_text_is_tokenized_and_its_prefix_pinned(
    run: Run, address: str, script: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--time-to-live", "60", "--salt", "pepper", "--server", address)
    assert run("pin", "--prompt", "x" * 33, *flags) == 0
    assert capsys.readouterr().out == "p1 2\n"
    (asked,) = script.pins
    assert bytes(asked.token_ids) == b"x" * 33
    assert (asked.time_to_live_s, asked.salt) == (60, "pepper")


def test_a_pin_is_let_go_by_its_name(
    run: Run, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("unpin", "p1", "--server", address) == 0
    assert run("unpin", "p2", "--server", address) != 0
    assert "no such pin" in capsys.readouterr().err
