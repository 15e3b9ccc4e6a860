"""What the tests of the worker's shell share."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def socket_path() -> Iterator[Path]:
    """Path of a Unix socket nobody listens on.

    Not below `tmp_path`: a socket's path has at most 107 bytes, and 103 on a Mac.
    """
    with tempfile.TemporaryDirectory(prefix="pagemill-") as folder:
        yield Path(folder) / "socket"
