"""The list of planted bugs keeps up with the code."""

import pytest

from mutations.planted import Mutation, mutations
from source_tree import ROOT

PLANTED = mutations()
NOT_HERE = {
    11: "no transfer runs beside the steps before there are tiers",
}
"""Traps of the reference that there is nothing to fall into for."""


@pytest.mark.parametrize("mutation", PLANTED, ids=[each.bug for each in PLANTED])
def test_a_planted_bug_can_still_be_planted(mutation: Mutation) -> None:
    text = (ROOT / mutation.file).read_text(encoding="utf-8")
    assert text.count(mutation.old) == 1
    mutated = text.replace(mutation.old, mutation.new)
    assert mutated != text
    if not mutation.is_native:  # That needs minutes of a compiler: trying the bug checks it.
        compile(mutated, mutation.file, "exec")
    assert (ROOT / "tests" / mutation.hint).exists()


def test_the_list_has_every_trap_and_no_bug_twice() -> None:
    assert len(PLANTED) >= 30
    assert len({each.bug for each in PLANTED}) == len(PLANTED)
    assert {each.trap for each in PLANTED} - {0} == {*range(1, 13)} - NOT_HERE.keys()
