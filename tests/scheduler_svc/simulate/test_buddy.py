"""Regions never overlap, and what was given back grows together again."""

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.simulate.buddy import BuddyAllocator, Region


@settings(deadline=None, max_examples=100)
@given(
    slots=st.integers(1, 300),
    moves=st.lists(st.tuples(st.integers(1, 80), st.integers(0, 9)), max_size=60),
)
def test_regions_are_disjoint_and_memory_comes_back(
    slots: int, moves: list[tuple[int, int]]
) -> None:
    memory = BuddyAllocator(slots)
    held: list[Region] = []
    for wanted, choice in moves:
        region = memory.allocate(wanted)
        if region is not None:
            assert wanted <= region.size < 2 * wanted
            assert region.start % region.size == 0
            assert region.start + region.size <= slots
            held.append(region)
        elif held:
            memory.release(held.pop(choice % len(held)))
        used = [slot for r in held for slot in range(r.start, r.start + r.size)]
        assert len(used) == len(set(used)) == memory.num_allocated
    for region in held:
        memory.release(region)
    assert memory.num_allocated == 0
    largest = 1 << (slots.bit_length() - 1)
    assert memory.fits(largest)
    assert not memory.fits(largest + 1)
    assert memory.allocate(largest) == Region(0, slots.bit_length() - 1)


def test_seven_longest_requests_fit_the_papers_memory() -> None:
    memory = BuddyAllocator(15_700)
    regions = [memory.allocate(2048) for _ in range(8)]
    assert [region is not None for region in regions] == [True] * 7 + [False]
