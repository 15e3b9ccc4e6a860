"""What can never fit is refused when it comes, and what is taken ends, whatever the numbers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_worker import generate_alone
from scheduler_bench import BLOCK_SIZE, Bench, bench, request
from scheduler_svc.core.errors import InvalidRequestError, NeverFitsError, QueueFullError
from scheduler_svc.core.queue_room import LONGEST_RETRY_S, SHORTEST_RETRY_S
from scheduler_svc.core.request import FinishReason

LENGTH = 48
S = 10**9


@settings(deadline=None, max_examples=200)
@given(
    num_blocks=st.integers(1, 14),
    prompt=st.integers(0, LENGTH + 4),
    wanted=st.none() | st.integers(1, LENGTH + 4),
    budget=st.integers(1, 64),
    threshold=st.integers(0, 8),
    depth=st.sampled_from((1, 2)),
    policy=st.sampled_from(("fcfs", "priority", "fair")),
)
def test_a_request_is_refused_if_it_can_never_fit_and_otherwise_ends(
    num_blocks: int,
    prompt: int,
    wanted: int | None,
    budget: int,
    threshold: int,
    depth: int,
    policy: str,
) -> None:
    table = bench(
        num_blocks,
        policy,
        rows=min(4, budget),
        budget=budget,
        length=LENGTH,
        depth=depth,
        long_prefill_token_threshold=threshold,
    )
    asked = request("r", [1] * prompt, wanted)
    slots = num_blocks * BLOCK_SIZE
    # The last token is sampled and never stored.
    fits = 1 <= prompt < LENGTH and prompt + (wanted or 1) <= min(LENGTH, slots + 1)
    if not fits:
        with pytest.raises(InvalidRequestError):
            table.send(asked)
        assert not table.scheduler.has_work
        return
    table.send(asked)
    table.run()
    count = min(LENGTH, slots + 1) - prompt if wanted is None else wanted
    assert asked.finish_reason is FinishReason.LENGTH
    assert asked.output_token_ids().tolist() == generate_alone([1] * prompt, count, frozenset())


@pytest.mark.parametrize(
    ("prompt", "wanted", "kind", "words"),
    [
        (0, 4, InvalidRequestError, "must have at least one token"),
        (
            LENGTH,
            None,
            InvalidRequestError,
            "has 48 tokens, must be below the model's length of 48",
        ),
        (40, 9, InvalidRequestError, "max_tokens is 9 behind a prompt of 40 tokens"),
        (33, None, NeverFitsError, "need 33 slots of KV memory, the whole pool has 32"),
        (30, 4, NeverFitsError, "need 33 slots of KV memory, the whole pool has 32"),
    ],
)
def test_the_refusal_names_both_numbers_though_the_queue_is_full(
    prompt: int, wanted: int | None, kind: type[InvalidRequestError], words: str
) -> None:
    table = full_queue()
    with pytest.raises(kind, match=words):
        table.send(request("r", [1] * prompt, wanted))


def full_queue() -> Bench:
    """One runs and two wait, which is all that may."""
    table = bench(8, rows=1, length=LENGTH, waiting=2, max_waiting_tokens=20)
    table.send(request("runs", [0] * 4, 20))
    table.turn()
    table.now_ns = 100 * S
    table.send(request("first", [1]), request("second", [2]))
    return table


@pytest.mark.parametrize(
    ("waited_s", "retry_s"),
    [(0, SHORTEST_RETRY_S), (3, SHORTEST_RETRY_S), (40, 10.0), (10_000, LONGEST_RETRY_S)],
)
def test_a_full_queue_says_when_a_quarter_of_it_will_have_passed(
    waited_s: int, retry_s: float
) -> None:
    table = full_queue()
    table.now_ns += waited_s * S
    with pytest.raises(QueueFullError, match="2 requests wait, at most 2 may") as refused:
        table.send(request("third", [1]))
    assert refused.value.retry_after_s == pytest.approx(retry_s)


def test_a_queue_full_of_tokens_says_so_as_well() -> None:
    table = bench(64, rows=1, max_waiting_tokens=20)
    table.send(request("runs", [0] * 4, 20))
    table.turn()
    table.send(request("first", [1] * 15))
    table.now_ns += 80 * S
    with pytest.raises(QueueFullError, match="15 tokens wait") as refused:
        table.send(request("second", [1] * 6))
    assert refused.value.retry_after_s == pytest.approx(20, abs=0.1)
    table.send(request("third", [1] * 5))
