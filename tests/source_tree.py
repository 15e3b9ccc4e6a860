"""The files that the ratchets of tests/repo look at."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT_FOLDERS = ("scheduler_svc", "worker_svc", "kernels", "clients")


def python_files(*folders: str) -> Iterator[Path]:
    """Yield the Python files below folders of the repository, in order of name."""
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def product_files() -> Iterator[Path]:
    """Yield the files that ship, but for generated ones."""
    yield from python_files(*PRODUCT_FOLDERS)


def relative(path: Path) -> str:
    """Return a path as the documents write it: from the root of the repository."""
    return path.relative_to(ROOT).as_posix()


def tree(path: Path) -> ast.Module:
    """Return a file's syntax tree."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def documents() -> Iterator[Path]:
    """Yield the documents whose claims about the tree are checked."""
    yield from sorted(ROOT.glob("*.md"))
    yield from sorted((ROOT / "docs").rglob("*.md"))
