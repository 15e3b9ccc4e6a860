"""The models of the benches, written once, and the dense reference of bench R."""

from collections.abc import Callable
from pathlib import Path

import pytest

import transformers_oracle as oracle
from cases.table_llama import write_table_llama
from tiny_llama import write_tiny_llama

Reference = Callable[[list[int], int], list[int]]


@pytest.fixture(scope="session")
def bench_t(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path of the model whose next token is i + 1, of any length."""
    return write_table_llama(tmp_path_factory.mktemp("table") / "model")


@pytest.fixture(scope="session")
def bench_r(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path of the tiny random model."""
    return write_tiny_llama(tmp_path_factory.mktemp("random") / "model")


@pytest.fixture(scope="session")
def reference(bench_r: Path) -> Reference:
    """The tokens that bench R gives densely, without cache or batch: `(prompt, count)`."""
    model = oracle.load_directory(bench_r)
    return lambda prompt, count: oracle.greedy(model, prompt, count)
