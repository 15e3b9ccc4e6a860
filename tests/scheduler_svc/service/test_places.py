"""Each rank has one worker, and those that are left when another is lost find theirs again."""

import pytest

from scheduler_svc.service.places import Places


def full(num_ranks: int) -> Places:
    places = Places(num_ranks)
    for rank in range(num_ranks):
        places.take(rank, 100 + rank)
    return places


def test_ranks_are_given_from_0_on_and_each_once() -> None:
    places = Places(3)
    given = []
    for boot_id in (7, 8, 9):
        rank = places.choose(boot_id, None, now_s=0.0)
        assert rank is not None
        places.take(rank, boot_id)
        given.append(rank)
    assert given == [0, 1, 2]
    assert places.choose(10, None, now_s=0.0) is None


def test_a_wish_is_granted_where_the_rank_is_free() -> None:
    places = Places(3)
    assert places.choose(7, 2, now_s=0.0) == 2
    places.take(2, 7)
    assert places.choose(8, 2, now_s=0.0) == 0


def test_a_worker_that_is_still_there_gets_its_own_place() -> None:
    assert full(3).choose(101, 2, now_s=0.0) == 1


@pytest.mark.parametrize(("now_s", "strangers"), [(4.9, [1, None]), (5.0, [0, 1])])
def test_a_stranger_gets_only_the_lost_ones_place_until_the_others_had_time_to_return(
    now_s: float, strangers: list[int | None]
) -> None:
    places = full(3)
    for rank in range(3):
        places.leave(rank)
    for rank in (0, 2):
        places.keep(rank, 100 + rank, until_s=5.0)
    given: list[int | None] = []
    for boot_id in (7, 8):
        place = places.choose(boot_id, None, now_s)
        given.append(place)
        if place is not None:
            places.take(place, boot_id)
    assert given == strangers
    assert places.choose(102, None, now_s) == 2
