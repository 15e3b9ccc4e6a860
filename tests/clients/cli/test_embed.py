"""`embed` prints vectors as JSON; `complete` passes rules on, and prints what is told."""

import json
import sys
from collections.abc import Callable

import pytest

from pagemill.cli import command
from pagemill.v1 import inference_pb2
from scripted_server import ScriptedServer, accepted, delta, ended, says

Run = Callable[..., int]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, address: str) -> Run:
    """Return a runner of `pagemill COMMAND` against the server, which returns the exit status."""

    def run(name: str, *arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["pagemill", name, "--server", address, *arguments])
        with pytest.raises(SystemExit) as caught:
            command.main()
        assert isinstance(caught.value.code, int)
        return caught.value.code

    return run


def test_each_text_is_a_line(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("embed", "Hi", "there") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line) for line in lines] == [[0, 0.5], [1, 0.5]]


def test_json_is_one_object(
    run: Run, script: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("embed", "Hi", "--pooling", "mean", "--normalize", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "vectors": [[0, 0.5]],
        "usage": {"prompt_tokens": 5, "cached_tokens": 2},
    }
    [asked] = script.embeds
    assert (asked.pooling, asked.normalize) == (inference_pb2.POOLING_MEAN, True)


def test_another_pooling_is_wrong_usage(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("embed", "Hi", "--pooling", "max") == 2
    assert "pooling is max, must be last or mean" in capsys.readouterr().err


def test_rules_and_what_is_told_are_flags_of_complete(
    run: Run, script: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    def position(*entries: tuple[int, float, int]) -> inference_pb2.PositionLogprobs:
        return inference_pb2.PositionLogprobs(
            entries=[
                inference_pb2.TokenLogprob(token_id=id_, logprob=logprob, rank=rank, text=b"\xe2x")
                for id_, logprob, rank in entries
            ]
        )

    told = delta("x", [7])
    told.deltas[0].logprobs.append(position((7, -0.5, 1), (8, -1.5, 2)))
    last = ended(1)
    last.summary.prompt_logprobs.extend([position(), position((5, -2.0, 3))])
    script.plays = [says(accepted(), told, last)]
    rules = ["--presence-penalty", "0.5", "--frequency-penalty", "-1", "--repetition-penalty", "2"]
    rules += ["--logit-bias", "5=-1.5", "--logit-bias", "7=100", "--allowed-token-ids", "7"]
    rules += ["--bad-words", "no", "--bad-words", "never", "--min-tokens", "1"]
    tells = ["--logprobs", "1", "--prompt-logprobs", "0", "--echo", "--json"]
    assert run("complete", "--prompt", "Hi", *rules, *tells) == 0
    [asked] = script.requests
    sampling, output = asked.sampling, asked.output
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -1)
    assert sampling.repetition_penalty == 2
    assert dict(sampling.logit_bias) == {5: -1.5, 7: 100}
    assert (list(sampling.allowed_token_ids), list(sampling.bad_words)) == ([7], ["no", "never"])
    assert asked.stopping.min_tokens == 1
    assert (output.logprobs, output.HasField("prompt_logprobs"), output.echo) == (1, True, True)
    shown = json.loads(capsys.readouterr().out)
    entry = {"token_id": 7, "logprob": -0.5, "rank": 1, "text": "\ufffdx"}
    assert shown["logprobs"][0][0] == entry
    assert shown["logprobs"][0][1]["rank"] == 2
    assert [len(each) for each in shown["prompt_logprobs"]] == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--logprobs", "1"), "told with --json only"),
        (("--logit-bias", "5:1"), "logit-bias is 5:1, must be ID=VALUE"),
    ],
)
def test_what_cannot_be_shown_or_read_is_wrong_usage(
    run: Run, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    assert run("complete", "--prompt", "Hi", *arguments) == 2
    assert words in capsys.readouterr().err
