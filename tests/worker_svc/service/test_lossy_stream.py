"""What a log cannot write is lost, and nothing else."""

import errno
import io

import pytest

from worker_svc.service.logs import make_logger
from worker_svc.service.lossy_stream import LossyStream


class Full(io.StringIO):
    """A disk without room, or a pipe without a reader."""

    room = 0

    def write(self, text: str) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "no space left")
        return super().write(text)

    def flush(self) -> None:
        if not self.room:
            raise BrokenPipeError


def test_what_cannot_be_written_is_lost_and_what_can_be_is_not() -> None:
    full = Full()
    stream = LossyStream(full)
    stream.write("lost\n")
    stream.flush()
    full.room = 1
    stream.write("kept\n")
    stream.flush()
    assert full.getvalue() == "kept\n"


def test_other_faults_are_ours() -> None:
    class Wrong(io.StringIO):
        def write(self, text: str) -> int:
            raise ValueError(text)

    with pytest.raises(ValueError, match="why"):
        LossyStream(Wrong()).write("why")


def test_a_worker_goes_on_without_its_log() -> None:
    make_logger(Full(), "text", "info").warning("no scheduler")
