"""Size is a decision: a file above 400 lines and a function above 60 stand here with a reason."""

import ast

from source_tree import product_files, python_files, relative, tree

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

# path: why it reads better in one piece.
LONG_FILES: dict[str, str] = {}
# path::function: why it reads better in one piece.
LONG_FUNCTIONS: dict[str, str] = {}


def test_a_long_file_has_a_reason() -> None:
    long = {
        relative(path)
        for path in (*product_files(), *python_files("tests", "bench"))
        if len(path.read_text(encoding="utf-8").splitlines()) > MAX_FILE_LINES
    }
    assert long == set(LONG_FILES)


def test_a_long_function_has_a_reason() -> None:
    long = {
        f"{relative(path)}::{node.name}"
        for path in product_files()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or node.lineno) - node.lineno >= MAX_FUNCTION_LINES
    }
    assert long == set(LONG_FUNCTIONS)
