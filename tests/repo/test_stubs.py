"""The committed stubs of pagemill.v1 are what the pinned generators make of the .proto files."""

import sys
from pathlib import Path

from commands import run
from source_tree import ROOT


def test_committed_stubs_equal_fresh_ones(tmp_path: Path) -> None:
    # -o: the environment that runs the tests is as installed as it will be.
    no_install = ("-o", f"{sys.prefix}/.installed")
    run("make", *no_install, "stubs", f"VENV={sys.prefix}", f"STUBS={tmp_path}")
    fresh = {path.name: path.read_text() for path in (tmp_path / "pagemill/v1").iterdir()}
    committed = {
        path.name: path.read_text() for path in (ROOT / "proto/pagemill/v1").glob("*_pb2*")
    }
    assert fresh.keys() == committed.keys()
    stale = [name for name, text in fresh.items() if committed[name] != text]
    assert not stale, "run `make stubs`"
