"""Size is a decision: what is above its bound stands here with a reason."""

import ast
from collections.abc import Iterable
from pathlib import Path

from source_tree import product_files, python_files, relative, tree

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
# A test file is a list of sentences, which nobody has to hold in mind at once.
MAX_TEST_FILE_LINES = 500

# path: why it reads better in one piece.
LONG_FILES = {
    "bench/gpu_kernels.py": "one self-contained script, to be copied to a machine with a GPU",
}
# path::function: why it reads better in one piece.
_KERNEL = "a kernel's contract is its docstring, and its body reads from load to store"
LONG_FUNCTIONS: dict[str, str] = dict.fromkeys(
    (
        "kernels/cpu_attention.py::attend",
        "kernels/multi_lora.py::multi_lora",
        "kernels/paged_attention_classic.py::paged_attention_classic",
        "kernels/paged_attention_classic.py::_paged_attention_classic",
        "kernels/paged_decode.py::paged_decode",
        "kernels/paged_decode.py::launch_decode",
        "kernels/paged_decode.py::_paged_decode",
        "kernels/paged_prefill.py::paged_prefill",
        "kernels/paged_prefill.py::_paged_prefill",
        "kernels/quantised_matmul.py::quantised_matmul",
        "kernels/quantised_matmul.py::_quantised_matmul",
        "kernels/rms_norm.py::rms_norm",
        "kernels/rotary.py::rotary",
        "kernels/rotary.py::_rotary",
        "kernels/sample.py::_sample",
        "kernels/shared_prefix.py::shared_prefix",
        "kernels/shared_prefix.py::_shared_prefix",
    ),
    _KERNEL,
) | {
    "clients/pagemill/cli/serve.py::serve": "a list of parameters, one for each setting",
    "scheduler_svc/core/request.py::__init__": "a list of fields, each with its meaning below it",
    "clients/pagemill/cli/complete.py::complete": "its signature is the list of flags",
}


def _longer_than(bound: int, files: Iterable[Path]) -> set[str]:
    return {
        relative(path)
        for path in files
        if len(path.read_text(encoding="utf-8").splitlines()) > bound
    }


def test_a_long_file_has_a_reason() -> None:
    long = _longer_than(MAX_FILE_LINES, product_files())
    long |= _longer_than(MAX_TEST_FILE_LINES, python_files("tests", "bench"))
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
