"""`chat` keeps the conversation, and forgets a turn that got no answer."""

import signal
import subprocess
import sys
from subprocess import PIPE

import grpc
import pytest
from typer.testing import CliRunner

from pagemill.cli.command import make_app
from pagemill.cli.terminal import shown
from scripted_server import HELLO, ScriptedServer, fails, silent


def converse(address: str, lines: str, *more: str) -> str:
    """Return what a conversation of these lines printed."""
    result = CliRunner().invoke(make_app(), ["chat", "--server", address, *more], input=lines)
    assert result.exit_code == 0, result.output
    return result.output


def turns(script: ScriptedServer, number: int) -> list[tuple[str, str]]:
    """Return the conversation as a request had it."""
    return [(turn.role, turn.content) for turn in script.requests[number].chat.messages]


def test_each_turn_knows_those_before_it(address: str, script: ScriptedServer) -> None:
    output = converse(address, "One\n\nTwo\n", "--system", "Be brief.", "--temperature", "0")
    assert turns(script, 0) == [("system", "Be brief."), ("user", "One")]
    assert turns(script, 1) == [*turns(script, 0), ("assistant", "Hello"), ("user", "Two")]
    assert "Hello" in output
    assert "2 generated" in output


def test_a_turn_without_an_answer_is_forgotten(address: str, script: ScriptedServer) -> None:
    script.plays = [fails(grpc.StatusCode.RESOURCE_EXHAUSTED, "queue is full"), HELLO]
    output = converse(address, "One\nTwo\n")
    assert "queue is full" in output
    assert turns(script, 1) == [("user", "Two")]


def test_quick_asks_once(address: str, script: ScriptedServer) -> None:
    assert converse(address, "", "--quick", "Hi") == "Hello\n"
    assert turns(script, 0) == [("user", "Hi")]


def test_an_interrupt_stops_the_answer_and_not_the_conversation(
    address: str, script: ScriptedServer
) -> None:
    script.plays = [silent, HELLO]
    program = [sys.executable, "-m", "pagemill.cli", "chat", "--server", address]
    with subprocess.Popen(program, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True) as process:
        assert process.stdin is not None
        process.stdin.write("One\n")
        process.stdin.flush()
        assert script.request_came.wait(30)
        process.send_signal(signal.SIGINT)
        assert script.cancellation.wait(30)
        out, err = process.communicate("Two\n", timeout=30)
    assert process.returncode == 0
    assert turns(script, 1) == [("user", "Two")]
    assert "Hello" in out
    assert "(stopped)" in err


def test_an_address_that_is_none_is_said_so() -> None:
    result = CliRunner().invoke(make_app(), ["chat", "--server", "nonsense", "--quick", "Hi"])
    assert "address is" in str(result.exception)


@pytest.mark.parametrize("text", ["\x1b[2J", "a\x07b", "\x9b1m"])
def test_a_terminal_is_not_told_what_to_do(text: str) -> None:
    assert shown(text).isprintable()
    assert shown("a\n\tb") == "a\n\tb"
