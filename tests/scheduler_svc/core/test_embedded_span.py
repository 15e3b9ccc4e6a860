"""What a request carries besides tokens reaches the worker, and no more than it needs."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from scheduler_bench import Bench, bench
from scheduler_svc.core.block_hash import Adapter, ContentSpan, ExtraKeys
from scheduler_svc.core.embedded_span import EmbeddedSpan, not_computed
from scheduler_svc.core.request import Request, Sampling, Stopping
from scheduler_svc.core.step_plan import AdmittedRow

WIDTH = 3
"""Bytes of a vector."""


def span(start: int, length: int, content_id: str = "x") -> EmbeddedSpan:
    """A span whose vectors say their positions."""
    values = b"".join(bytes([place] * WIDTH) for place in range(start, start + length))
    return EmbeddedSpan(ContentSpan(content_id, start, length), values, 2)


@given(
    bounds=st.lists(st.integers(0, 40), min_size=4, max_size=4, unique=True).map(sorted),
    computed=st.integers(0, 41),
)
def test_exactly_the_positions_that_are_not_computed_are_sent(
    bounds: list[int], computed: int
) -> None:
    spans = tuple(span(start, end - start) for start, end in (bounds[:2], bounds[2:]))
    wanted = [p for s in spans for p in range(s.content.start, s.content.end) if p >= computed]
    sent = not_computed(spans, computed)
    assert [p for s in sent for p in range(s.content.start, s.content.end)] == wanted
    assert b"".join(s.values for s in sent) == b"".join(bytes([p] * WIDTH) for p in wanted)


def _request(
    name: str, spans: tuple[EmbeddedSpan, ...], adapter: Adapter | None = None, slot: int = 0
) -> Request:
    extra = ExtraKeys(adapter=adapter, spans=tuple(each.content for each in spans))
    return Request(
        name,
        array("i", [0, 1] * 6),
        Sampling(0.0),
        Stopping(4),
        extra=extra,
        adapter_slot=slot,
        embeddings=spans,
    )


def _run(run: Bench, request: Request) -> list[AdmittedRow]:
    """Send a request and run until it has ended; return how it was admitted."""
    run.worker.roots[request.request_id] = hash((request.extra.adapter, request.extra.spans))
    run.send(request)
    admitted: list[AdmittedRow] = []
    while run.scheduler.has_work:
        if (plan := run.plan()) is not None:
            admitted += plan.admitted
        run.answer()
    return admitted


def test_a_hit_needs_only_what_is_behind_it() -> None:
    run = bench(num_blocks=20)
    (first,) = _run(run, _request("a", (span(2, 9),)))
    assert [each.values for each in first.embeddings] == [span(2, 9).values]
    (again,) = _run(run, _request("b", (span(2, 9),)))
    start = again.num_computed_tokens
    assert start > 2
    assert [each.values for each in again.embeddings] == [span(start, 11 - start).values]
    assert [each.content.start for each in again.embeddings] == [start]
    (other,) = _run(run, _request("c", (span(2, 9, "y"),)))
    assert other.num_computed_tokens == 0


def test_an_adapter_is_told_by_its_slot_and_named_by_its_content() -> None:
    run = bench(num_blocks=20)
    (first,) = _run(run, _request("a", (), Adapter("poet", 1), 3))
    (same,) = _run(run, _request("b", (), Adapter("poet", 1), 5))
    (other,) = _run(run, _request("c", (), Adapter("poet", 2), 3))
    assert [row.adapter for row in (first, same, other)] == [3, 5, 3]
    hits = [row.num_computed_tokens > 0 for row in (first, same, other)]
    assert hits == [False, True, False]


def test_members_of_a_family_carry_what_their_root_does() -> None:
    root = Request(
        "r",
        array("i", [0] * 5),
        Sampling(0.0),
        Stopping(2),
        num_sequences=3,
        adapter_slot=2,
        embeddings=(span(0, 2),),
    )
    assert [(each.adapter_slot, each.embeddings) for each in root.family] == [
        (2, root.embeddings)
    ] * 3
