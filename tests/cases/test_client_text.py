"""Area j of the public cases: text of clients in logs and as paths."""

import io
import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import structlog

from cases.stack import Stack, serving
from cases.table_llama import write_table_llama
from pagemill.client import (
    AsyncClient,
    InvalidArgumentError,
    NotFoundError,
    PagemillError,
)
from scheduler_svc.service.logs import configure_logs

# J-04.

ATTACKS = [
    "x\nERROR fake",
    "x\rERROR fake",
    "\x1b[2J",
    "a\0b",
    "x\u2028ERROR fake",
    "y" * 100_000,
    "%s%n{0.__class__}",
    "${jndi:x}",
]


@pytest.fixture
def _logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    structlog.reset_defaults()
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.usefixtures("_logging_as_before")
@pytest.mark.parametrize("log_format", ["text", "json"])
async def test_case_J_04_client_text_forges_no_line(bench_t: Path, log_format: Any) -> None:
    stream = io.StringIO()
    configure_logs(log_format, "info", stream)
    async with serving(bench_t) as stack:
        begin = stream.getvalue().count("\n")
        served = sum([await _attack(stack, text) for text in ["harmless", *ATTACKS]])
        await stack.idle()
        lines = stream.getvalue().split("\n")[begin:-1]
    # A line for each request that ran, and one for each exception, whatever they were sent.
    assert served > 20
    assert len(lines) == served + len(ATTACKS) + 1
    for line in lines:
        assert line.isprintable()
        assert not line.startswith(("ERROR", "x", "y", "a", "%", "$"))
        assert "SECRET PROMPT" not in line
        if log_format == "json":
            values = {key: value for key, value in json.loads(line).items() if key != "exception"}
            assert all(len(str(value)) <= 256 for value in values.values())
        else:
            assert len(line) < 8192 + 1024


async def _attack(stack: Stack, text: str) -> int:
    """Put a text wherever a client can put one; return how many requests were taken."""
    good: dict[str, Any] = {"prompt": "SECRET PROMPT", "max_tokens": 2, "temperature": 0}
    served = 0
    for field in ("request_id", "model", "salt", "stop", "tenant", "adapter"):
        with suppress(PagemillError, TypeError):
            await stack.client.complete(**{**good, field: text})
            served += 1
    # The text of a log line may be a client's, too: that of an exception.
    try:
        raise ValueError(text)
    except ValueError:
        structlog.get_logger("case").exception("failed", user=text)
    if text.isascii() and text.isprintable() and len(text) < 1000:  # gRPC sends no others
        async with AsyncClient(
            stack.address, metadata={"x-user": text, "traceparent": text}
        ) as client:
            await client.complete(**good)
            served += 1
    return served


# J-05.

EVIL = [
    "../evil", "a/../../evil", "/etc/x", "..", ".", "a\0b", "x" * 300, "CON", "%2e%2e/",
    "\uff0e\uff0e/evil", "~", "name.",
]  # fmt: skip


class Opened:
    """Paths that this process opens, while it is on."""

    def __init__(self) -> None:
        self.on = False
        self.paths: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.on and event in {"open", "os.mkdir", "os.remove", "os.rename", "os.symlink"}:
            self.paths.append(str(arguments[0]))


@pytest.fixture(scope="module")
def opened() -> Opened:
    """The one hook of this module: a hook cannot be taken away."""
    return Opened()


@pytest.fixture
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def _listing(folder: Path) -> dict[str, int]:
    return {str(path): path.lstat().st_mtime_ns for path in sorted(folder.rglob("*"))}


@pytest.mark.usefixtures("_elsewhere")
async def test_case_J_05_no_text_of_a_client_becomes_a_path(tmp_path: Path, opened: Opened) -> None:
    """Adapters have a case of their own; there are no directories of offloaded blocks yet."""
    model = write_table_llama(tmp_path / "model")
    async with serving(model) as stack:
        await stack.client.complete(prompt="warm", max_tokens=1)
        before = _listing(tmp_path)
        opened.on = True
        try:
            for name in EVIL:
                with pytest.raises((NotFoundError, InvalidArgumentError)):
                    await stack.client.complete(model=name, prompt=[1], max_tokens=1)
                with pytest.raises((NotFoundError, InvalidArgumentError)):
                    await stack.client.model_info(name)
                for field in ("salt", "tenant", "request_id"):
                    with suppress(InvalidArgumentError):
                        given: dict[str, Any] = {field: name}
                        await stack.client.complete(prompt=[1], max_tokens=1, **given)
        finally:
            opened.on = False
        await stack.idle()
    assert _listing(tmp_path) == before
    ours = [path for path in opened.paths if any(name in path for name in EVIL if len(name) > 2)]
    assert ours == []
    assert [path for path in opened.paths if path.startswith(os.getcwd())] == []
