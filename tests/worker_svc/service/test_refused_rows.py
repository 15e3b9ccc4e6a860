"""A refused row never gives a token, from its admission to its release, and others always do."""

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from worker_svc.runtime.step_plan import (
    AdmittedRow,
    BlockCopies,
    Candidates,
    ForkedRow,
    SamplingParams,
    StepPlan,
    StepResult,
    StepTiming,
    no_int32,
)
from worker_svc.service.refused_rows import RefusedRows

rows = st.sets(st.integers(0, 5), max_size=4)


def plan(admitted: set[int], released: set[int], reset: bool, forked: dict[int, int]) -> StepPlan:
    return StepPlan(
        step_id=0,
        reset=reset,
        released_rows=np.array(sorted(released), dtype=np.int32),
        forked=tuple(ForkedRow(row, parent, 0, None, 0) for row, parent in sorted(forked.items())),
        admitted=tuple(
            AdmittedRow(row, "", no_int32(), 1, 0, 1, (), SamplingParams())
            for row in sorted(admitted)
        ),
        appended=(),
        copies=BlockCopies(no_int32(), no_int32()),
        exception_rows=no_int32(),
        exception_num_computed_tokens=no_int32(),
        exception_num_new_tokens=no_int32(),
    )


forks = st.dictionaries(st.integers(0, 5), st.integers(0, 5), max_size=3)


@given(st.lists(st.tuples(rows, rows, rows, st.booleans(), rows, forks), max_size=10))
@example([({0}, {0}, set(), False, set(), {}), ({0}, set(), set(), False, set(), {0: 0})])
def test_refused_rows_and_their_forks_are_struck_until_they_are_released(
    steps: list[tuple[set[int], set[int], set[int], bool, set[int], dict[int, int]]],
) -> None:
    refused = RefusedRows()
    expected: set[int] = set()
    for admitted, asked, released, reset, sampling, forked in steps:
        refusals = [(row, "why") for row in sorted(admitted & asked)]
        before = set() if reset else expected - released
        inherited = {row for row, parent in forked.items() if parent in before}
        expected = (before - set(forked) | inherited) - admitted | (admitted & asked)
        told = refused.follow(plan(admitted, released, reset, forked), refusals)
        assert dict(told) == dict.fromkeys(inherited | (admitted & asked), "why")
        result = sampled(sorted(sampling))
        struck = refused.strike(result, told)
        left = sorted(sampling - expected)
        assert struck.rows.tolist() == left
        assert struck.tokens.tolist() == [10 * row + nth for row in left for nth in range(row + 1)]
        assert struck.num_tokens.tolist() == [row + 1 for row in left]
        assert struck.candidates is not None
        assert struck.candidates.ids.tolist() == [row for row in left for _ in range(row)]
        assert struck.candidates.logprobs.tolist() == [-row for row in left for _ in range(row)]
        assert struck.candidates.counts.tolist() == left
        assert dict(struck.row_errors) == {9: "own"} | dict(told)


def sampled(rows: list[int]) -> StepResult:
    """Row r samples r + 1 tokens and has r candidates."""
    counts = np.array(rows, dtype=np.int32)
    tokens = [10 * row + nth for row in rows for nth in range(row + 1)]
    return StepResult(
        step_id=0,
        rows=counts,
        tokens=np.array(tokens, dtype=np.int32),
        timing=StepTiming(0, 0, 0, 0),
        row_errors=((9, "own"),),
        num_tokens=counts + np.int32(1),
        candidates=Candidates(
            ids=np.repeat(counts, counts),
            logprobs=-np.repeat(counts, counts).astype(np.float32),
            counts=counts,
        ),
    )


def test_plain_results_stay_plain() -> None:
    refused = RefusedRows()
    told = refused.follow(plan({1, 2}, set(), False, {}), [(1, "why")])
    columns = np.array([1, 2], dtype=np.int32)
    result = StepResult(0, columns, columns * 7, StepTiming(0, 0, 0, 0), ())
    struck = refused.strike(result, told)
    assert (struck.rows.tolist(), struck.tokens.tolist()) == ([2], [14])
    assert struck.num_tokens.tolist() == []
    assert struck.candidates is None
