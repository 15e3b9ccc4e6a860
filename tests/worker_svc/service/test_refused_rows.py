"""A refused row never gives a token, from its admission to its release, and others always do."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from worker_svc.runtime.step_plan import (
    AdmittedRow,
    BlockCopies,
    SamplingParams,
    StepPlan,
    StepResult,
    StepTiming,
    no_int32,
)
from worker_svc.service.refused_rows import RefusedRows

rows = st.sets(st.integers(0, 5), max_size=4)


def plan(admitted: set[int], released: set[int], reset: bool) -> StepPlan:
    return StepPlan(
        step_id=0,
        reset=reset,
        released_rows=np.array(sorted(released), dtype=np.int32),
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


@given(st.lists(st.tuples(rows, rows, rows, st.booleans(), rows), max_size=10))
def test_refused_rows_are_struck_until_they_are_released(
    steps: list[tuple[set[int], set[int], set[int], bool, set[int]]],
) -> None:
    refused = RefusedRows()
    expected: set[int] = set()
    for admitted, asked, released, reset, sampling in steps:
        refusals = [(row, "why") for row in sorted(admitted & asked)]
        expected = (set() if reset else expected - released) - admitted | (admitted & asked)
        refused.follow(plan(admitted, released, reset), refusals)
        columns = np.array(sorted(sampling), dtype=np.int32)
        result = StepResult(0, columns, columns * 7, StepTiming(0, 0, 0, 0), ((9, "own"),))
        struck = refused.strike(result, refusals)
        assert struck.rows.tolist() == sorted(sampling - expected)
        assert struck.tokens.tolist() == [7 * row for row in sorted(sampling - expected)]
        assert dict(struck.row_errors) == {9: "own"} | dict(refusals)
