"""Documents name only what is there: files, names in files, and pages they link to."""

import re
from pathlib import Path

import pytest

from source_tree import ROOT, documents, relative

TOP_LEVEL = {path.name for path in ROOT.iterdir()}
QUOTED = re.compile(r"`([\w./*-]+(?:::\w+)?)`")
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")


@pytest.mark.parametrize("document", [*documents()], ids=relative)
def test_every_path_in_a_document_exists(document: Path) -> None:
    """A path is what starts with a folder of the root; `path::name` also wants the name in it."""
    missing = []
    for quoted in QUOTED.findall(document.read_text(encoding="utf-8")):
        path, _, name = quoted.partition("::")
        if "/" not in path or path.partition("/")[0] not in TOP_LEVEL:
            continue
        found = [*ROOT.glob(path.rstrip("/"))]
        if not found or (name and name not in found[0].read_text(encoding="utf-8")):
            missing.append(quoted)
    assert missing == []


@pytest.mark.parametrize("document", [*documents()], ids=relative)
def test_every_link_in_a_document_leads_somewhere(document: Path) -> None:
    links = LINK.findall(document.read_text(encoding="utf-8"))
    assert [
        link
        for link in links
        if "://" not in link and not (document.parent / link).resolve().exists()
    ] == []


def test_the_architecture_names_every_folder_of_code() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    folders = {
        relative(path.parent)
        for top in ("scheduler_svc", "worker_svc", "kernels", "clients", "proto")
        for path in (ROOT / top).rglob("*.py")
    }
    assert [folder for folder in sorted(folders) if folder not in text] == []
