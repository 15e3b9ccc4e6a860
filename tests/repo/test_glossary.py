"""Our names are the glossary's: one word for one thing (docs/glossary.md)."""

import ast
from collections.abc import Iterator
from pathlib import Path

from source_tree import product_files, relative, tree

# A name we never give: the name the glossary gives.
SYNONYMS = {
    "page_table": "block_table",
    "req_idx": "row",
    "table_idx": "row",
    "out_loc": "slot_mapping",
    "past_len": "num_computed_tokens",
    "past_lens": "num_computed_tokens",
    "cached_len": "num_computed_tokens",
    "extend_len": "num_new_tokens",
    "cu_seqlens_q": "query_start_loc",
    "context_lens": "seq_lens",
    "is_prefill": "a step's shape is no state of a request",
    "is_decode": "a step's shape is no state of a request",
}
# Parts of a name: abbreviations that are no words of the field.
ABBREVIATIONS = {"req", "reqs", "cfg", "mgr", "blk", "blks"}
# Job titles: a class is named for what it is.
TITLES = ("Manager", "Handler", "Processor", "Helper", "Mixin", "Base", "Impl", "Util", "Utils")
# Rooms for things without a home.
ROOMS = {"util", "utils", "common", "helper", "helpers", "misc", "base", "manager"}


def test_no_name_is_a_synonym_or_an_abbreviation() -> None:
    found = [
        f"{relative(path)}: {name}"
        for path in product_files()
        for name in _given_names(tree(path))
        if name in SYNONYMS or ABBREVIATIONS & set(name.split("_"))
    ]
    assert found == []


def test_no_class_has_a_job_title() -> None:
    found = [
        f"{relative(path)}: {node.name}"
        for path in product_files()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef) and node.name.endswith(TITLES)
    ]
    assert found == []


def test_no_file_is_a_room_for_leftovers() -> None:
    assert [relative(path) for path in product_files() if ROOMS & {*_stems(path)}] == []


def _stems(path: Path) -> Iterator[str]:
    yield path.stem
    yield path.parent.name


def _given_names(module: ast.Module) -> Iterator[str]:
    """Yield the names the module gives, in lower case; not those it merely uses."""
    for node in ast.walk(module):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name.lower()
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
                yield name.lower()
            case ast.Attribute(attr=name, ctx=ast.Store()):
                yield name.lower()
            case _:
                pass
