"""The latest names are remembered, each once, and no more than there is room for."""

from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.core.block_hash import BlockHash
from scheduler_svc.core.evicted_names import EvictedNames

steps = st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=40)


@given(capacity=st.integers(1, 5), steps=steps)
def test_the_latest_are_remembered(capacity: int, steps: list[tuple[int, bool]]) -> None:
    """A discarded name leaves its place empty, so that fewer may be remembered for a while."""
    names = EvictedNames(capacity)
    places: list[int | None] = []
    for number, is_added in steps:
        name = BlockHash(bytes([number]))
        was_here = number in places[-capacity:]
        places = [None if seen == number else seen for seen in places]
        if is_added:
            names.add(name)
            places.append(number)
        else:
            assert names.discard(name) == was_here
        remembered = {seen for seen in places[-capacity:] if seen is not None}
        assert {n for n in range(7) if BlockHash(bytes([n])) in names} == remembered
        assert len(names) == len(remembered) <= capacity


def test_nothing_is_remembered_after_a_clear() -> None:
    names = EvictedNames(2)
    names.add(BlockHash(b"a"))
    names.clear()
    assert BlockHash(b"a") not in names
    assert len(names) == 0
