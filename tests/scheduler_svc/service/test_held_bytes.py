"""What live requests hold beside tokens is bounded over all of them, and given back."""

from contextlib import ExitStack
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_bench import Bench, running
from engine_door_use import ask, submission
from scheduler_svc.core.errors import QueueFullError
from scheduler_svc.core.reports import Reports
from scheduler_svc.service import held_bytes
from scheduler_svc.service.engine_door import Submission
from scheduler_svc.service.held_bytes import MAX_TOLD_BYTES, HeldBytes, told_bytes
from scheduler_svc.service.request_reading import MAX_PROMPT_ENTRIES


def telling(num_tokens: int, num_candidates: int | None) -> Submission:
    asked = submission("r", [1] * num_tokens)
    return replace(asked, reports=Reports(prompt_logprobs=num_candidates))


asked = st.builds(telling, st.integers(1, 50), st.none() | st.integers(0, 20))


@given(each=st.lists(asked, max_size=12), room=st.integers(1, 300_000))
def test_told_prompts_never_hold_more_than_their_room_together(
    each: list[Submission], room: int
) -> None:
    held, total = HeldBytes(0, room), 0
    with ExitStack() as stack:
        for one in each:
            num_bytes = told_bytes(one)
            if num_bytes and total and total + num_bytes > room:
                with pytest.raises(QueueFullError, match=f"would be more than {room}"):
                    stack.enter_context(held.of(one))
            else:
                stack.enter_context(held.of(one))
                total += num_bytes
    with held.of(telling(1, 0)):
        pass
    assert held._told_bytes == 0


def test_who_has_nothing_told_is_never_refused_for_others() -> None:
    held = HeldBytes(0, 1)
    with held.of(telling(50, 20)), held.of(telling(50, None)):
        pass


@pytest.mark.parametrize("num_candidates", [0, 1, 20])
def test_the_largest_answer_leaves_room_for_another(num_candidates: int) -> None:
    positions = MAX_PROMPT_ENTRIES // (num_candidates + 1)
    bytes_of_one = told_bytes(telling(1, num_candidates))
    assert 2 * positions * bytes_of_one <= MAX_TOLD_BYTES


async def test_the_engine_refuses_at_the_door_and_serves_once_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(held_bytes, "_POSITION_BYTES", MAX_TOLD_BYTES // 4)
    async with running(Bench()) as bench:
        async with bench.door.open(telling(3, 0)):
            with pytest.raises(QueueFullError, match="prompt log-probabilities"):
                async with bench.door.open(replace(telling(2, 0), request_id="other")):
                    pytest.fail("it was let in")
            assert len(await ask(bench.door, "plain", [1, 2], 3)) == 3
        async with bench.door.open(telling(2, 0)):
            assert bench.engine.num_live == 1
