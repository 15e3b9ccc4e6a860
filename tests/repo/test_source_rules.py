"""Product code runs no code it was handed, prints only in the CLI, and swallows no error.

ruff looks for these too; here its answers count even where a line asks it to be quiet, and
each exception stands in one table with its reason.
"""

import ast
import json
from pathlib import Path

from commands import installed, run
from source_tree import PRODUCT_FOLDERS, product_files, relative, tree

RULES = {
    "S101": "assert",
    "S102": "exec",
    "S301": "pickle",
    "S302": "marshal",
    "S307": "eval",
    "S506": "yaml.load",
    "S602": "a command through a shell",
    "S605": "a command through a shell",
    "T201": "print",
    "BLE001": "a broad except",
    "E722": "a bare except",
}

# (path, rule): why it is right there.
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("scheduler_svc/service/step_observers.py", "BLE001"): "whatever goes wrong in an observer is "
    "logged, and ends its observing rather than everyone's requests (case I-02)",
    (
        "worker_svc/service/launch_loop.py",
        "BLE001",
    ): "outermost frame of the answering thread, which hands what it caught to the main one",
    ("worker_svc/service/step_stream.py", "BLE001"): "outermost frame of the reading thread, which "
    "hands what it caught to the main one",
    ("worker_svc/service/worker.py", "BLE001"): "outermost frame of a worker's work, which tells "
    "the scheduler, logs and ends the process",
}

# Modules that build objects from bytes by running what the bytes say.
FORBIDDEN_IMPORTS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "jsonpickle"}


def test_product_code_keeps_the_rules() -> None:
    strict = ("--isolated", "--ignore-noqa", "--no-cache", f"--select={','.join(RULES)}")
    quiet = ("--exit-zero", "--output-format=json")
    findings = json.loads(run(installed("ruff"), "check", *strict, *quiet, *PRODUCT_FOLDERS))
    found = {(relative(Path(finding["filename"])), finding["code"]) for finding in findings}
    assert found == set(EXCEPTIONS)


def test_product_code_unpickles_nothing() -> None:
    found = [
        f"{relative(path)}: {name}"
        for path in product_files()
        for node in ast.walk(tree(path))
        for name in _unpicklers(node)
    ]
    assert found == []


def _unpicklers(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.load":
        return ["torch.load"]
    return [name for name in _imported(node) if name.partition(".")[0] in FORBIDDEN_IMPORTS]


def _imported(node: ast.AST) -> list[str]:
    match node:
        case ast.Import():
            return [alias.name for alias in node.names]
        case ast.ImportFrom(module=str(module), level=0):
            return [module]
        case _:
            return []
