"""The parts meet only in pagemill.v1, and only the worker needs torch."""

import sys

import pytest

from commands import installed, run
from source_tree import ROOT, python_files


def module_names(folder: str, root: str = ".") -> list[str]:
    """Return the names under which the files of a folder are imported."""
    return [
        ".".join(path.relative_to(ROOT / root).with_suffix("").parts).removesuffix(".__init__")
        for path in python_files(folder)
        if path.name != "__main__.py"
    ]


@pytest.mark.parametrize(
    "modules",
    [
        pytest.param(module_names("scheduler_svc"), id="scheduler"),
        pytest.param(module_names("clients/pagemill", "clients"), id="clients"),
    ],
)
def test_all_but_the_worker_imports_without_torch(modules: list[str]) -> None:
    program = (
        "import sys, importlib\n"
        # None in sys.modules makes an import of that name raise ImportError.
        "sys.modules.update(dict.fromkeys(('torch', 'triton', 'kernels', 'worker_svc')))\n"
        "for name in sys.argv[1:]: importlib.import_module(name)"
    )
    assert modules
    run(sys.executable, "-c", program, *modules)


def test_the_import_contracts_hold() -> None:
    run(installed("lint-imports"), "--no-cache", environment={"PYTHONPATH": ".:proto:clients"})
