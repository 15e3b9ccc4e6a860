"""A hidden fact stands in the text once, at its depth."""

import pytest

from pagemill.cli.bench_kv_quality import needle_text


@pytest.mark.parametrize(("depth", "first", "last"), [(0.0, 0, 0), (0.5, 45, 55), (1.0, 99, 100)])
def test_a_fact_stands_at_its_depth(depth: float, first: int, last: int) -> None:
    text = needle_text(("Oslo", "2764"), 100, depth)
    fact = "The secret number of Oslo is 2764."
    assert text.count("2764") == 1
    sentences = text.split(". ")
    assert len(sentences) == 101
    (place,) = [place for place, one in enumerate(sentences) if fact.startswith(one.rstrip("."))]
    assert first <= place <= last
