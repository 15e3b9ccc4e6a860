"""What the documents tell people to type exists: make targets, commands, flags, the example."""

import asyncio
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from commands import run
from pagemill.cli.command import make_app
from scripted_server import ScriptedServer, serving
from source_tree import ROOT, documents, relative

FENCE = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
EXAMPLE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:make|pagemill|\.venv/bin/pagemill) [^`]+)`")


def _commands(document: Path) -> Iterator[list[str]]:
    """Yield the words of each command in a document."""
    text = document.read_text(encoding="utf-8")
    for block in FENCE.findall(text):
        for line in block.splitlines():
            yield shlex.split(line, comments=True)
    for inline in INLINE.findall(text):
        yield shlex.split(inline)


def _targets() -> set[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z-]+):.*##", makefile, re.MULTILINE))


@pytest.mark.parametrize("document", [*documents()], ids=relative)
def test_every_make_target_in_a_document_exists(document: Path) -> None:
    wanted = {
        word
        for words in _commands(document)
        if words[:1] == ["make"]
        for word in words[1:]
        if "=" not in word
    }
    assert wanted <= _targets()


@pytest.mark.parametrize("document", [*documents()], ids=relative)
def test_every_command_and_flag_in_a_document_exists(document: Path) -> None:
    for words in _commands(document):
        if words and words[0].rpartition("/")[2] == "pagemill":
            _check_command(words[1:])


def _check_command(words: list[str]) -> None:
    command: Any = typer.main.get_command(make_app())
    rest = list(words)
    while rest and hasattr(command, "commands"):
        assert rest[0] in command.commands, words
        command = command.commands[rest.pop(0)]
    known = {
        option
        for parameter in command.params
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    flags = {word.partition("=")[0] for word in rest if word.startswith("--")}
    passes_on = command.context_settings.get("ignore_unknown_options", False)
    assert passes_on or flags <= known, words


async def test_the_python_example_prints_what_the_server_says(tmp_path: Path) -> None:
    (example,) = EXAMPLE.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    script = ScriptedServer()
    async with serving(script) as address:
        program = tmp_path / "example.py"
        program.write_text(example.replace("127.0.0.1:50051", address), encoding="utf-8")
        printed = await asyncio.to_thread(run, sys.executable, program)
    assert printed == "Hello"


def test_every_make_target_has_a_line_of_help() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (phony,) = re.findall(r"^\.PHONY: ((?:.*\\\n)*.*)$", makefile, re.MULTILINE)
    assert set(phony.replace("\\", "").split()) == _targets()
    assert run("make", "--no-print-directory").count("\n") == len(_targets())
