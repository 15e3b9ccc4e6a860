"""The worker's forward loop without scheduler and gRPC, asked for runs line by line."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

from pagemill.cli.exit_status import CliError

_ANSWER_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 10.0
# A run's prompts are one line.
_MAX_LINE_BYTES = 16 * 2**20


class BareLoop:
    """A program that answers one JSON object a line, after a first line of its own."""

    def __init__(self, answers: asyncio.StreamReader, requests: asyncio.StreamWriter) -> None:
        self._answers = answers
        self._requests = requests

    async def run(self, request: Mapping[str, object]) -> dict[str, Any]:
        """Return what a run took.

        Raises: CliError if the program ends instead; it has said why on standard error.
        """
        self._requests.write(json.dumps(request).encode() + b"\n")
        return await self.answer()

    async def answer(self) -> dict[str, Any]:
        """Return the next answer; the first says that the model is loaded.

        Raises: CliError if the program ends instead, or takes too long.
        """
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                line = await self._answers.readline()
        except TimeoutError as error:
            raise CliError(f"the bare loop was silent for {_ANSWER_TIMEOUT_S:g} s") from error
        if not line:
            raise CliError("the bare loop ended before it answered")
        answer: dict[str, Any] = json.loads(line)
        return answer


@asynccontextmanager
async def bare_loop(command: Sequence[str]) -> AsyncIterator[BareLoop]:
    """Run the program for the length of a block, its model loaded.

    It ends with its standard input, so also when this process is killed.
    """
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_MAX_LINE_BYTES,
        process_group=0,
    )
    # Both are there: they were asked for as pipes.
    answers = cast(asyncio.StreamReader, process.stdout)
    requests = cast(asyncio.StreamWriter, process.stdin)
    try:
        loop = BareLoop(answers, requests)
        await loop.answer()
        yield loop
    finally:
        requests.close()
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
