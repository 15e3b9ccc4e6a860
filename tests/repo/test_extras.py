"""The extra `scheduler` alone is enough to run a scheduler, without torch.

The one test that needs the package index. The installation is not editable, so it also proves
that what is built holds what is imported.
"""

import json
import signal
import subprocess
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from commands import run
from pagemill.client import Client
from source_tree import ROOT
from tiny_llama import write_tiny_llama

STOP_LIMIT_S = 30


@pytest.fixture(scope="module")
def clean_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Interpreter of a new environment with nothing in it but `.[scheduler]`."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=True)
    python = folder / "bin/python"
    constraints = ("-c", ROOT / "constraints.txt")
    run(python, "-m", "pip", "install", "-q", *constraints, f"{ROOT}[scheduler]", folder=folder)
    return python


@contextmanager
def _scheduler(python: Path, model: Path) -> Iterator[str]:
    """Run a scheduler away from the sources; yield its address. It must drain and end with 0."""
    command = [python, "-m", "scheduler_svc", model]
    command += ["--listen=127.0.0.1:0", "--worker-listen=127.0.0.1:0"]
    process = subprocess.Popen(
        [*map(str, command)], cwd=model, stdout=subprocess.PIPE, text=True, env={}
    )
    with process:
        try:
            assert process.stdout is not None
            word, _, address = process.stdout.readline().strip().partition(" ")
            assert word == "listening"
            yield address
            process.send_signal(signal.SIGTERM)
            assert process.wait(STOP_LIMIT_S) == 0
        finally:
            process.kill()


def test_a_replay_has_its_measured_beam_searches_with_it(
    clean_python: Path, tmp_path: Path
) -> None:
    command = ("-m", "scheduler_svc.simulate", "--lengths", "alpaca", "--requests", "3", "--json")
    printed = run(clean_python, *command, "--beam-width", "4", folder=tmp_path)
    assert json.loads(printed)["requests"] == 3


def test_a_scheduler_starts_where_there_is_no_torch(clean_python: Path, tmp_path: Path) -> None:
    probe = "import importlib.util as u, sys; sys.exit(any(map(u.find_spec, sys.argv[1:])))"
    run(clean_python, "-c", probe, "torch", "triton", "transformers", folder=tmp_path)
    model = write_tiny_llama(tmp_path / "tiny")
    with _scheduler(clean_python, model) as address, Client(address) as client:
        assert client.server_info().model_names == ("tiny",)
        assert client.tokenize("ab") == tuple(b"ab")
        assert not client.health()
