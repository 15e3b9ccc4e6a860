"""An event is one line that begins with its time, whatever a client sent."""

import io
import json
import logging
from collections.abc import Iterator
from typing import Literal

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.service.logs import MAX_VALUE_CHARACTERS, clean_text, configure_logs

Format = Literal["text", "json"]

ATTACKS = [
    "x\nERROR fake",
    "x\rERROR fake",
    "\x1b[2J",
    "a\0b",
    "x\u2028ERROR fake",
    "y" * 100_000,
    "%s%n{0.__class__}",
    "${jndi:x}",
    '"} {"level": "error',
    "\ud800",
]


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    structlog.reset_defaults()
    root.handlers[:] = handlers
    root.setLevel(level)


def logged(log_format: Format, text: str) -> list[str]:
    """Return the lines that events with a client's text leave."""
    stream = io.StringIO()
    configure_logs(log_format, "info", stream)
    log = structlog.get_logger("test")
    log.info("request ended", request_id=text, output_tokens=3)
    logging.getLogger("grpc").error("a library says %s", text)
    try:
        raise ValueError(text)
    except ValueError:
        log.exception("failed")
    log.debug("below the level", request_id=text)
    return stream.getvalue().split("\n")


@pytest.mark.parametrize("log_format", ["text", "json"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_client_text_forges_no_line(log_format: Format, attack: str) -> None:
    lines = logged(log_format, attack)
    assert len(lines) == 4
    assert lines.pop() == ""
    for line in lines:
        assert line.isprintable()
        assert line.startswith('{"' if log_format == "json" else "timestamp=")


@pytest.mark.parametrize("attack", ATTACKS)
def test_json_lines_parse_and_keep_short_values(attack: str) -> None:
    ended, library, failed = (json.loads(line) for line in logged("json", attack)[:3])
    assert ended["request_id"] == clean_text(attack)
    assert len(ended["request_id"]) <= MAX_VALUE_CHARACTERS
    assert (ended["event"], ended["level"], ended["output_tokens"]) == ("request ended", "info", 3)
    assert library["logger"] == "grpc"
    assert "Traceback" in failed["exception"]


@given(text=st.text())
def test_clean_text_is_printable_and_bounded(text: str) -> None:
    cleaned = clean_text(text, 20)
    assert cleaned.isprintable()
    assert len(cleaned) <= 20
    if text.isprintable():
        assert cleaned == text[:20]
