"""The page of plots shows what is committed, and nothing in it says when or where it was drawn."""

import json
import re

import pytest

from source_tree import ROOT

FOLDER = ROOT / "docs/figures"
NAMES = sorted(path.stem for path in FOLDER.glob("*.svg"))


def test_every_plot_is_shown_and_has_its_numbers() -> None:
    page = (ROOT / "docs/figures.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"!\[[^]]+\]\(figures/(\w+)\.svg\)", page)) == NAMES
    assert sorted(path.stem for path in FOLDER.glob("*.json")) == NAMES
    assert NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_plot_is_the_same_whenever_it_is_drawn(name: str) -> None:
    drawn = (FOLDER / f"{name}.svg").read_text(encoding="utf-8")
    assert "<dc:date>" not in drawn
    assert len(drawn) < 60_000


def test_the_plotted_numbers_keep_the_bounds() -> None:
    """The bounds hold for what people are shown, not for the short replays of tests alone."""
    utilisation = json.loads((FOLDER / "utilisation.json").read_text("utf-8"))["pagemill"]
    assert utilisation["paged"] >= 95.5
    for allocator, expected in (("max", 18.2), ("pow2", 26.5), ("oracle", 35.5)):
        assert utilisation[allocator] == pytest.approx(expected, abs=2)
    batch = json.loads((FOLDER / "batch.json").read_text("utf-8"))["pagemill"]
    assert batch["paged"] >= 4.3 * batch["max"]
    sharing = json.loads((FOLDER / "sharing.json").read_text("utf-8"))["n"]["pagemill"]
    least = {"sharegpt": {"2": 16, "4": 24, "6": 27}, "alpaca": {"2": 6, "4": 9, "6": 10}}
    for lengths, bounds in least.items():
        for n, bound in bounds.items():
            assert sharing[lengths][n] >= bound
    recomputed = json.loads((FOLDER / "recomputed.json").read_text("utf-8"))
    assert recomputed["cheapest"]["40%"] <= 0.75 * recomputed["newest"]["40%"]
