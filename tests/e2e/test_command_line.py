"""The commands that scripts rely on do what they say, and say what they refuse."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.serving import Served, serving
from tiny_llama import write_tiny_llama


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"), max_position_embeddings=2048)


@pytest.fixture(scope="module")
def served(tiny: Path) -> Iterator[Served]:
    with serving(str(tiny)) as running:
        yield running


def pagemill(*arguments: str, limit_s: float = 60.0) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "pagemill.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)


def complete(served: Served, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return pagemill("complete", "--server", served.address, *arguments)


def test_complete_prints_one_json_object(served: Served) -> None:
    flags = ("--prompt", "abc" * 20, "--max-tokens", "7", "--temperature", "0", "--ignore-eos")
    first, again = (complete(served, *flags, "--json") for _ in range(2))
    assert (first.returncode, again.returncode) == (0, 0), first.stderr
    answer, repeated = json.loads(first.stdout), json.loads(again.stdout)
    assert answer.keys() == {"text", "token_ids", "finish_reason", "usage", "timing"}
    assert answer["usage"].keys() == {"prompt_tokens", "completion_tokens", "cached_tokens"}
    assert answer["timing"].keys() == {"queue_s", "ttft_s", "total_s"}
    assert len(answer["token_ids"]) == answer["usage"]["completion_tokens"] == 7
    assert answer["finish_reason"] == "length"
    assert answer["usage"]["cached_tokens"] == 0
    assert repeated["usage"]["cached_tokens"] == 48
    assert repeated["token_ids"] == answer["token_ids"]
    assert 0 <= answer["timing"]["queue_s"] <= answer["timing"]["ttft_s"]
    assert answer["timing"]["ttft_s"] <= answer["timing"]["total_s"]


def test_a_seed_repeats_a_draw_whatever_runs_beside_it(served: Served) -> None:
    flags = ("--prompt", "xyz", "--max-tokens", "24", "--temperature", "0.9", "--ignore-eos")

    async def draw(seed: str) -> str:
        command = [sys.executable, "-m", "pagemill.cli", "complete", "--server", served.address]
        process = await asyncio.create_subprocess_exec(
            *command, *flags, "--seed", seed, "--json", stdout=subprocess.PIPE
        )
        printed, _ = await process.communicate()
        return str(json.loads(printed)["token_ids"])

    async def draw_all() -> tuple[list[str], str]:
        together = await asyncio.gather(*(draw(seed) for seed in ("42", "7", "42", "8")))
        return together, await draw("42")

    together, alone = asyncio.run(draw_all())
    assert together[0] == together[2] == alone
    assert len(set(together)) == 3


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--temperature", "-1"), "temperature"),
        (("--max-tokens", "5000"), "max_tokens"),
        (("--top-p", "0"), "top_p"),
    ],
)
def test_a_refusal_is_one_line_and_a_status(
    served: Served, flags: tuple[str, ...], named: str
) -> None:
    refused = complete(served, "--prompt", "a", *flags, "--json")
    assert refused.returncode == 3
    assert refused.stdout == ""
    assert len(refused.stderr.strip().splitlines()) == 1
    assert named in refused.stderr


def test_no_server_is_one_line_and_a_status() -> None:
    absent = pagemill("complete", "--server", "127.0.0.1:1", "--prompt", "a", "--timeout", "5")
    assert absent.returncode == 4
    assert "Traceback" not in absent.stderr
    assert "127.0.0.1:1" in absent.stderr


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("no-such-model",), "no-such-model"),
        (("demo", "--block-size", "0"), "block"),
        (("demo", "--max-num-batched-tokens", "0"), "batched"),
        (("demo", "--dtype", "float7"), "float7"),
        (("demo", "--listen", "nonsense"), "nonsense"),
        (("demo", "--no-such-flag"), "no-such-flag"),
        (("demo", "--max-model-len", "9000000"), "9000000"),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else value,
)
def test_an_impossible_setting_is_named_and_ends_with_status_2(
    flags: tuple[str, ...], named: str
) -> None:
    refused = pagemill("serve", *flags)
    assert refused.returncode == 2, refused.stderr
    assert named in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_second_server_on_the_same_port_says_so(served: Served, tiny: Path) -> None:
    refused = pagemill("serve", str(tiny), "--device", "cpu", "--listen", served.address)
    assert refused.returncode == 2
    assert served.address in refused.stderr
    assert "Traceback" not in refused.stderr


def test_ctrl_c_ends_the_command_in_order(tiny: Path) -> None:
    with serving(str(tiny)) as running:
        os.killpg(running.process.pid, signal.SIGINT)
        assert running.process.wait(40) in {0, 130}
        assert "Traceback" not in running.log()


def test_sigterm_lets_running_streams_end(tiny: Path) -> None:
    with serving(str(tiny)) as running:
        command = [sys.executable, "-m", "pagemill.cli", "complete", "--server", running.address]
        command += ["--prompt", "a", "--max-tokens", "1500", "--temperature", "0", "--ignore-eos"]
        with subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, text=True) as client:
            deadline = 200
            while deadline and "running=1" not in _load(running.address):
                deadline -= 1
            assert running.stop() == 0
            printed, _ = client.communicate(timeout=30)
        assert len(json.loads(printed)["token_ids"]) == 1500


def _load(address: str) -> str:
    from pagemill.client import Client

    with Client(address) as client:
        return f"running={client.load().running}"


def test_version_comes_first_in_its_line() -> None:
    printed = pagemill("version")
    assert printed.returncode == 0
    assert printed.stdout.splitlines()[0] == "pagemill 0.1.0"
