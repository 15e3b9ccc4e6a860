"""One program of ours as a child process, with its own process group and a tether."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from pagemill.cli import tether
from pagemill.cli.exit_status import CliError, ExitStatus

_TAIL_LINES = 20
_REAP_TIMEOUT_S = 10.0


class Child:
    """A running or ended program. Its standard output is a file, so that nobody must drain it."""

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        output: Path,
        log: Path | None,
        *,
        own_group: bool = True,
    ) -> None:
        self.name = name
        self._process = process
        self._output = output
        self._log = log
        self._own_group = own_group

    @property
    def status(self) -> int | None:
        """Exit status as a shell gives it, 128 + n for signal n. None while it runs."""
        code = self._process.returncode
        return code if code is None or code >= 0 else 128 - code

    def said(self, word: str) -> str | None:
        """Return what stands behind `word` on a line of standard output. None: not yet said."""
        for line in self._output.read_text(encoding="utf-8", errors="replace").splitlines(True):
            if line.startswith(f"{word} ") and line.endswith("\n"):
                return line.removeprefix(f"{word} ").strip()
        return None

    def tell(self, line: str) -> None:
        """Write the line that the program waits for on its standard input, and close that.

        Nothing happens if it has ended, or waits for none.
        """
        if self._process.stdin is not None:
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.close()

    def last_words(self) -> str:
        """Return the last lines of standard error. Empty if they went to the terminal."""
        if self._log is None:
            return ""
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "".join(f"\n  {line}" for line in lines[-_TAIL_LINES:])

    def terminate(self) -> None:
        """Ask the program to stop. Nothing happens to one that has ended."""
        self._signal(os.kill, signal.SIGTERM)

    def kill(self) -> None:
        """Kill the program and, in a group of its own, what it started.

        Nothing happens to one that has ended.
        """
        self._signal(os.killpg if self._own_group else os.kill, signal.SIGKILL)

    def _signal(self, send: Callable[[int, int], None], number: signal.Signals) -> None:
        # Not asyncio's send_signal: it may reap the program under the watcher that waits for
        # it, and the exit status would be lost. The program may have ended unknown to us.
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                send(self._process.pid, number)

    async def ended_within(self, timeout_s: float) -> bool:
        """Wait for the end; tell whether it came in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._process.wait()
        except TimeoutError:
            return False
        return True

    async def wait(self) -> int:
        """Return the exit status, at the program's own end: whoever calls this lives by it."""
        await self._process.wait()
        return self.status or 0


class ChildEndedError(CliError):
    """A program ended that should not have. Has its exit status, or FAILED if that was 0."""

    def __init__(self, child: Child, when: str) -> None:
        super().__init__(
            f"the {child.name} ended with status {child.status} {when}{child.last_words()}",
            child.status or ExitStatus.FAILED,
        )


class Children:
    """All programs of one server. Leaving the block kills those that still run."""

    def __init__(self, folder: Path, *, keep_logs: bool, own_groups: bool = True) -> None:
        """Keep outputs in `folder`; logs too with `keep_logs`, else they go to standard error.

        Without `own_groups` the programs stay in this process's group.
        """
        self._folder = folder
        self._keep_logs = keep_logs
        self._own_groups = own_groups
        self._by_name: dict[str, Child] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()
        for child in self:
            await child.ended_within(_REAP_TIMEOUT_S)

    def __iter__(self) -> Iterator[Child]:
        """Yield the programs in the order of their first start."""
        yield from self._by_name.values()

    async def start(self, name: str, command: Sequence[str], *, is_told: bool = False) -> Child:
        """Start a program, tied to this process, by default in a process group of its own.

        One that `is_told` something reads a line from its standard input.

        A terminal's Ctrl-C thus reaches this process alone, which stops the others in order.
        A name is given again only when the program that had it has ended.
        """
        output = self._folder / f"{name}.out"
        log = self._folder / f"{name}.log" if self._keep_logs else None
        with _written(output) as stdout, _written(log) as stderr:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", tether.__file__, str(os.getpid())),
                *command,
                stdin=asyncio.subprocess.PIPE if is_told else asyncio.subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                process_group=0 if self._own_groups else None,
            )
        child = Child(name, process, output, log, own_group=self._own_groups)
        self._by_name[name] = child
        return child

    def kill(self) -> None:
        """Kill every program that still runs."""
        for child in self:
            child.kill()


@contextlib.contextmanager
def _written(path: Path | None) -> Iterator[IO[bytes] | None]:
    """Open a file to be written by a child. None stands for what this process has."""
    if path is None:
        yield None
    else:
        with path.open("wb") as file:
            yield file
