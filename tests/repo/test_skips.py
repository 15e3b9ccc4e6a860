"""Under PAGEMILL_NO_SKIP=1 a skip is a failure, unless the test needs a GPU."""

import os
import subprocess
import sys
from pathlib import Path

from source_tree import ROOT

TESTS = {
    "test_whole.py": "import pytest\npytest.importorskip('no_such_part')\n",
    "test_part.py": (
        "import pytest\n"
        "def test_lacks_a_part():\n    pytest.skip('a part is missing')\n"
        "@pytest.mark.gpu\ndef test_lacks_a_gpu():\n    pytest.skip('no GPU')\n"
        "def test_lacks_nothing():\n    pass\n"
    ),
    "pytest.ini": "[pytest]\nmarkers = gpu: needs one\n",
}


def outcomes(folder: Path, no_skip: str) -> set[str]:
    """Run the tests above under our conftest; return `OUTCOME file::test` of each."""
    for name, text in TESTS.items():
        (folder / name).write_text(text, encoding="utf-8")
    options = ("-p", "conftest", "-p", "no:cacheprovider", "-rA", "--continue-on-collection-errors")
    environment = {"PAGEMILL_NO_SKIP": no_skip, "PYTHONPATH": str(ROOT / "tests")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    kinds = ("PASSED", "FAILED", "ERROR", "SKIPPED")
    lines = [line for line in done.stdout.splitlines() if line.startswith(kinds)]
    assert lines, done.stdout + done.stderr
    return {" ".join(line.split()[:2]) for line in lines}


def test_a_skip_is_a_failure_under_the_rule_but_not_for_want_of_a_gpu(tmp_path: Path) -> None:
    assert outcomes(tmp_path, "1") == {
        "ERROR test_whole.py",
        "FAILED test_part.py::test_lacks_a_part",
        "SKIPPED [1]",
        "PASSED test_part.py::test_lacks_nothing",
    }


def test_a_skip_is_a_skip_without_the_rule(tmp_path: Path) -> None:
    assert outcomes(tmp_path, "0") == {"SKIPPED [1]", "PASSED test_part.py::test_lacks_nothing"}
