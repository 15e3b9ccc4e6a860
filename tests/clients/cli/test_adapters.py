"""`adapters` loads, lists and unloads, and says what a server refused."""

import sys
from collections.abc import Callable

import pytest

from pagemill.cli import command
from scripted_server import ScriptedServer

Run = Callable[..., int]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, address: str) -> Run:
    """Return a runner of `pagemill`, which returns the exit status."""

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["pagemill", *arguments, "--server", address])
        with pytest.raises(SystemExit) as caught:
            command.main()
        assert isinstance(caught.value.code, int)
        return caught.value.code

    return run


def test_adapters_come_and_go(
    run: Run, script: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("adapters", "load", "poet", "poets/one") == 0
    assert script.adapters == {"poet": "poets/one"}
    assert run("adapters", "list") == 0
    assert capsys.readouterr().out == "poet 0000000000000abc\n" * 2
    assert run("adapters", "unload", "poet") == 0
    assert script.adapters == {}


def test_what_a_server_refuses_is_said(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("adapters", "load", "poet", "nowhere") == 3
    assert "path is 'nowhere'" in capsys.readouterr().err
    assert run("adapters", "unload", "poet") == 3
    assert "no such adapter" in capsys.readouterr().err


def test_a_completion_names_its_adapter(run: Run, script: ScriptedServer) -> None:
    assert run("complete", "--prompt", "hi", "--adapter", "poet") == 0
    assert [request.adapter for request in script.requests] == ["poet"]
