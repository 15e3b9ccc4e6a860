"""Where to join is said in one line, in time, and else there is a sentence."""

import os
from collections.abc import Iterator

import pytest

from worker_svc.errors import ConfigError
from worker_svc.service.told_address import NobodyToldError, told_address

LIMIT_S = 30.0


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    for end in (reader, writer):
        try:
            os.close(end)
        except OSError:
            continue


@pytest.mark.parametrize(
    "pieces",
    [
        [b"unix:/run/a\n"],
        [b"uni", b"x:/run/a", b"\n"],
        [b"  unix:/run/a \r\nmore\n"],
    ],
)
def test_the_first_line_is_the_address(pipe: tuple[int, int], pieces: list[bytes]) -> None:
    for piece in pieces:
        os.write(pipe[1], piece)
    assert told_address(pipe[0], LIMIT_S) == "unix:/run/a"  # the other end is open still


def test_an_end_ends_the_line(pipe: tuple[int, int]) -> None:
    os.write(pipe[1], b"h:1")
    os.close(pipe[1])
    assert told_address(pipe[0], LIMIT_S) == "h:1"


@pytest.mark.parametrize("said", [b"", b"h:1"])
def test_a_line_that_does_not_come_is_waited_for_no_longer_than_the_limit(
    pipe: tuple[int, int], said: bytes
) -> None:
    os.write(pipe[1], said)
    with pytest.raises(NobodyToldError, match=r"join is '-', and .* no address within 0\.1 s"):
        told_address(pipe[0], 0.1)


@pytest.mark.parametrize("said", [b"", b"\n", b"-\n", b"h:0\n", b"\xff\xfe\n"])
def test_what_is_said_must_be_an_address(pipe: tuple[int, int], said: bytes) -> None:
    os.write(pipe[1], said)
    os.close(pipe[1])
    with pytest.raises(ConfigError, match=r"join is '-', and .* says '.*', must be HOST"):
        told_address(pipe[0], LIMIT_S)


def test_a_line_without_end_is_refused(pipe: tuple[int, int]) -> None:
    os.write(pipe[1], b"x" * 5000)
    with pytest.raises(ConfigError, match="says more than 4096 bytes in a line"):
        told_address(pipe[0], LIMIT_S)


def test_a_closed_standard_input_is_no_place_to_be_told_from(pipe: tuple[int, int]) -> None:
    os.close(pipe[0])
    for source in (None, pipe[0]):
        with pytest.raises(ConfigError, match=r"join is '-', and standard input cannot be read"):
            told_address(source, LIMIT_S)
