"""Lines come as they are written, and one that never comes keeps nothing waiting."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pagemill.cli.input_lines import MAX_LINE_BYTES, input_lines

LIMIT_S = 20.0
# Waits for a line that nobody writes, and is interrupted once its thread reads.
INTERRUPTED = """
import asyncio, sys
from pagemill.cli.input_lines import input_lines

async def main():
    lines = input_lines(0)
    first = await anext(lines)
    waiting = asyncio.create_task(anext(lines))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait((waiting,))
    print(first.strip(), waiting.cancelled())

asyncio.run(main())
"""


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        try:
            os.close(end)
        except OSError:
            continue


async def test_lines_come_as_they_are_written_until_the_end(pipe: tuple[int, int]) -> None:
    read_end, write_end = pipe
    lines = input_lines(read_end)
    async with asyncio.timeout(LIMIT_S):
        os.write(write_end, b"1x2x3\n\n\xff\n" + b"x" * (MAX_LINE_BYTES + 1) + b"\nend")
        assert [await anext(lines) for _ in range(3)] == ["1x2x3\n", "\n", "�\n"]
        assert [len(await anext(lines)) for _ in range(2)] == [MAX_LINE_BYTES, 2]
        os.close(write_end)
        assert [line async for line in lines] == ["end"]


def test_a_program_ends_while_it_waits_for_a_line() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        assert program.stderr is not None
        program.stdin.write("hello\n")
        try:
            # Its standard input stays open.
            assert program.wait(LIMIT_S) == 0
        finally:
            program.kill()
        assert program.stdout.read() == "hello True\n"
        assert program.stderr.read() == ""
