"""A server's own folder, for as long as it runs: its programs' settings, outputs and socket."""

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from pagemill.cli.exit_status import CliError, ExitStatus
from pagemill.cli.terminal import say

try:
    import fcntl
except ImportError:  # Windows has none, nor servers
    _CAN_LOCK = False
else:
    _CAN_LOCK = True

SOCKET = "workers"
"""Name of the socket between the programs."""

_PREFIX = "pagemill-"
_MARKER = "owner"
_MARK = b"pagemill server "
_MAX_PATH_BYTES = 103
"""Of a unix socket: macOS has the least. Linux has four more."""

_RANDOM_BYTES = 8
"""Of a temporary folder's name."""

_SPECIAL = frozenset("%?#")
"""gRPC reads addresses of sockets as URIs."""


@contextlib.contextmanager
def run_folder() -> Iterator[Path]:
    """Make a folder, yield it, and remove it; those of servers that were killed go before.

    It lies where temporary files do, unless no socket can be there.

    Raises: CliError if there is no place for it.
    """
    parent = _parent(Path(tempfile.gettempdir()), os.environ)
    _sweep(parent)
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=parent) as name, _marked(Path(name)):
        yield Path(name)


def _parent(usual: Path, environ: Mapping[str, str]) -> Path:
    """Return where the folder can be made, and say so if it is not the usual place."""
    if _can_hold_a_socket(usual):
        return usual
    runtime = Path(environ.get("XDG_RUNTIME_DIR") or "/nowhere")
    for other, is_safe in ((runtime, _is_private), (Path("/tmp"), _is_sticky)):  # noqa: S108 a folder of our own is made there
        if _can_hold_a_socket(other) and is_safe(other):
            say(f"no socket can be in {usual}: {_why_not(usual)}; this run's files are in {other}")
            return other
    raise CliError(
        f"TMPDIR is {usual}, where no socket can be: {_why_not(usual)}; set a shorter one",
        ExitStatus.USAGE,
    )


def _can_hold_a_socket(parent: Path) -> bool:
    return not _why_not(parent)


def _why_not(parent: Path) -> str:
    """Return why the socket's path would not do in a folder of ours there. Empty: it would."""
    num_bytes = len(os.fsencode(parent / _PREFIX)) + _RANDOM_BYTES + 1 + len(SOCKET)
    if num_bytes > _MAX_PATH_BYTES:
        return f"its path would have {num_bytes} bytes, must have at most {_MAX_PATH_BYTES}"
    if special := sorted(_SPECIAL & {*str(parent)}):
        return f"its path would have {' and '.join(special)}, which addresses give a meaning"
    return ""


def _is_private(folder: Path) -> bool:
    """Whether it is ours, and nobody else's."""
    try:
        about = folder.lstat()
    except OSError:
        return False
    mode = stat.S_IMODE(about.st_mode)
    return stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid() and mode == 0o700


def _is_sticky(folder: Path) -> bool:
    """Whether everyone may make files there, and only remove their own."""
    try:
        about = folder.stat()
    except OSError:
        return False
    return stat.S_ISDIR(about.st_mode) and bool(about.st_mode & stat.S_ISVTX)


@contextlib.contextmanager
def _marked(folder: Path) -> Iterator[None]:
    """Hold a lock in the folder, which the kernel takes away with this process alone."""
    if not _CAN_LOCK:
        yield
        return
    # No program that is started here inherits it. Named only once it is locked.
    with (folder / f".{_MARKER}").open("xb", buffering=0) as marker:
        fcntl.flock(marker, fcntl.LOCK_EX)
        marker.write(_MARK + b"%d\n" % os.getpid())
        (folder / f".{_MARKER}").rename(folder / _MARKER)
        yield


def _sweep(parent: Path) -> None:
    """Remove folders of servers that cannot have done so themselves.

    Only what is ours for certain: this user's, marked as this file does, and its mark unlocked.
    """
    if not _CAN_LOCK:
        return
    for folder in parent.glob(f"{_PREFIX}*"):
        # Another one may sweep here as well, and what is there may be of any kind.
        with contextlib.suppress(OSError):
            if _is_private(folder) and _is_abandoned(folder / _MARKER):
                shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(marker: Path) -> bool:
    """Whether a mark is there whose process is not. Raises: OSError if it is there, or no mark."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with os.fdopen(os.open(marker, flags), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return False
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return file.read(len(_MARK)) == _MARK
