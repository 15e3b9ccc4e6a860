"""A line of the log is one event, whatever texts are in it."""

import io
import json

import pytest

from worker_svc.service.logs import make_logger

FORGED = "r1\n2026-01-01 level=error event=forged\x1b[31m"


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_no_text_can_forge_a_line(log_format: str) -> None:
    stream = io.StringIO()
    log = make_logger(stream, log_format, "info")  # type: ignore[arg-type]
    log.warning("row failed", reason=FORGED, rows=[FORGED])
    assert stream.getvalue().count("\n") == 1
    assert "\x1b" not in stream.getvalue()
    assert "row failed" in stream.getvalue()


def test_a_line_is_one_write_since_others_write_to_the_same_stream() -> None:
    class Pipe(io.StringIO):
        def write(self, text: str) -> int:
            writes.append(text)
            return super().write(text)

    writes: list[str] = []
    make_logger(Pipe(), "text", "info").info("joined")
    assert [text[-1] for text in writes] == ["\n"]


def test_lines_below_the_level_are_not_written() -> None:
    stream = io.StringIO()
    log = make_logger(stream, "json", "info")
    log.debug("step", step_id=1)
    assert not stream.getvalue()
    log.info("joined", group=2)
    line = json.loads(stream.getvalue())
    assert (line["event"], line["level"], line["program"], line["group"]) == (
        "joined",
        "info",
        "worker",
        2,
    )
