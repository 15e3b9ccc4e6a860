"""`complete` asks once: JSON or text on standard output, errors on standard error, a status."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from pagemill.cli import command
from pagemill.v1 import generation_pb2, inference_pb2
from scripted_server import (
    ScriptedServer,
    accepted,
    delta,
    ended,
    fails,
    retry_info,
    says,
    sequence_ended,
    silent,
)

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


def test_json_is_one_object_with_the_names_that_stay(
    run: Run, address: str, script: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    script.plays = [says(accepted(), delta("Hé", [10]), delta("llo\n", [11]), ended(2, 16))]
    arguments = ["--max-tokens", "2", "--temperature", "0", "--ignore-eos", "--json"]
    assert run("complete", "--server", address, "--prompt", "Hi", *arguments) == 0
    assert json.loads(capsys.readouterr().out) == {
        "text": "Héllo\n",
        "token_ids": [10, 11],
        "finish_reason": "length",
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 16},
        "timing": {"queue_s": 0.25, "ttft_s": 0.5, "total_s": 1.5},
    }
    request = script.requests[0]
    assert request.text == "Hi"
    assert request.stopping.max_tokens == 2
    assert request.stopping.ignore_eos
    assert request.sampling.HasField("temperature")


def test_without_json_the_text_is_streamed(
    run: Run, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("complete", "--server", address, "--prompt", "Hi") == 0
    assert capsys.readouterr().out == "Hello\n"


SIDE_BY_SIDE = (
    accepted(),
    delta("one", [1], 1),
    delta("ze", [2], 0),
    sequence_ended(1, score=-0.25, cumulative_logprob=-1.0),
    delta("ro", [3], 0),
    ended(3),
)


def test_several_sequences_are_written_one_after_the_other(
    run: Run, address: str, script: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    script.plays = [says(*SIDE_BY_SIDE)]
    assert run("complete", "--server", address, "--prompt", "Hi", "--n", "2") == 0
    out = capsys.readouterr().out
    assert out == "[0] length\nzero\n[1] stop, score -0.2500, log-probability -1.0000\none\n"
    assert script.requests[0].sampling.n == 2


def test_beams_are_asked_for_and_all_sequences_are_in_the_json(
    run: Run, address: str, script: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    script.plays = [says(*SIDE_BY_SIDE)]
    flags = ["--beam-width", "4", "--num-returned", "2", "--length-penalty", "0.5"]
    flags += ["--early-stopping", "never", "--json"]
    assert run("complete", "--server", address, "--prompt", "Hi", *flags) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["text"] == "zero"
    assert answer["sequences"] == [
        {"text": "zero", "token_ids": [2, 3], "finish_reason": "length"},
        {
            "text": "one",
            "token_ids": [1],
            "finish_reason": "stop",
            "score": -0.25,
            "cumulative_logprob": -1.0,
        },
    ]
    beam = script.requests[0].beam
    assert (beam.width, beam.num_returned, beam.length_penalty) == (4, 2, 0.5)
    assert beam.early_stopping == generation_pb2.EARLY_STOPPING_NEVER


def test_a_chat_wraps_the_prompt_into_turns(run: Run, address: str, script: ScriptedServer) -> None:
    run("complete", "--server", address, "--prompt", "Hi", "--system", "Be brief.", "--chat")
    turns = script.requests[0].chat.messages
    assert [(turn.role, turn.content) for turn in turns] == [
        ("system", "Be brief."),
        ("user", "Hi"),
    ]


def test_a_prompt_may_come_from_a_file(
    run: Run, address: str, script: ScriptedServer, tmp_path: Path
) -> None:
    path = tmp_path / "prompt"
    path.write_text("x" * 1_000_000)
    assert run("complete", "--server", address, "--prompt-file", str(path)) == 0
    assert len(script.requests[0].text) == 1_000_000


@pytest.mark.parametrize(
    ("play", "status", "words"),
    [
        (fails(grpc.StatusCode.INVALID_ARGUMENT, "top_p is 2"), 3, "invalid argument: top_p is 2"),
        (fails(grpc.StatusCode.NOT_FOUND, "no model x"), 3, "not found: no model x"),
        (
            fails(grpc.StatusCode.RESOURCE_EXHAUSTED, "queue is full", retry_info(1.5)),
            4,
            "resource exhausted: queue is full (try again in 1.5 s)",
        ),
        (fails(grpc.StatusCode.DEADLINE_EXCEEDED, "too late"), 4, "deadline exceeded: too late"),
        (fails(grpc.StatusCode.INTERNAL, "a bug"), 1, "internal: a bug"),
    ],
)
def test_a_refusal_is_one_line_and_a_status(
    run: Run,
    address: str,
    script: ScriptedServer,
    capsys: pytest.CaptureFixture[str],
    play: object,
    status: int,
    words: str,
) -> None:
    script.plays = [play]  # type: ignore[list-item] # the table's plays are plays
    assert run("complete", "--server", address, "--prompt", "Hi", "--json") == status
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"pagemill: {words}\n")


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--prompt", "a", "--prompt-file", "b"),
        ("--prompt-file", "/no/such/file"),
        ("--prompt", "a", "--server", "nonsense"),
        ("--prompt", "a", "--timeout", "0"),
        ("--prompt", "a", "--max-tokens", "many"),
        ("--prompt", "a", "--early-stopping", "soon"),
        ("--no-such-flag",),
    ],
)
def test_wrong_usage_has_its_own_status(run: Run, arguments: tuple[str, ...]) -> None:
    assert run("complete", *arguments) == 2


def test_an_output_that_could_not_be_computed_fails(
    run: Run, address: str, script: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = ended()
    failed.finished[0].MergeFrom(
        inference_pb2.Finished(reason=generation_pb2.FINISH_REASON_ERROR, error="NaN in logits")
    )
    script.plays = [says(accepted(), failed)]
    assert run("complete", "--server", address, "--prompt", "Hi", "--json") == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["finish_reason"] == "error"
    assert "NaN in logits" in err


def test_an_interrupt_cancels_the_call(address: str, script: ScriptedServer) -> None:
    script.plays = [silent]
    program = [sys.executable, "-m", "pagemill.cli", "complete", "--server", address]
    with subprocess.Popen([*program, "--prompt", "Hi"], stderr=subprocess.PIPE) as process:
        assert script.request_came.wait(30)
        os.kill(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert script.cancellation.wait(10)
    assert b"Traceback" not in err
