"""The protocol follows buf's STANDARD rules, with the exceptions of proto/buf.yaml."""

from commands import installed, run
from source_tree import ROOT


def test_buf_finds_nothing() -> None:
    run(installed("buf"), "lint", folder=ROOT / "proto")
