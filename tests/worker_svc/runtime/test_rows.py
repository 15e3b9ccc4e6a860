"""Rows do what the plan says, in the plan's order, and refuse a plan that does not fit them."""

from dataclasses import replace

import pytest

from plan_driver import int32, make_plan
from worker_svc.errors import InvariantError
from worker_svc.runtime.block_tables import BlockTables
from worker_svc.runtime.rows import Rows
from worker_svc.runtime.step_plan import (
    AdmittedRow,
    AppendedBlocks,
    ForkedRow,
    Int32Array,
    SamplingParams,
    StepPlan,
)


def new_rows() -> Rows:
    return Rows(max_rows=4, max_tokens=16, tables=(BlockTables(4, 4, 4, last_block=20),), vocab=100)


def admission(row: int, count: int = 3, computed: int = 0, new: int | None = None) -> AdmittedRow:
    return AdmittedRow(
        row=row,
        request_id="r",
        tokens=int32(*range(count)),
        num_prompt_tokens=count,
        num_computed_tokens=computed,
        num_new_tokens=count - computed if new is None else new,
        block_tables=(int32(row + 1),),
        sampling=SamplingParams(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, seed=2**64 - 1),
        sequence_index=row,
    )


def test_each_kv_group_of_a_row_has_a_table_and_a_window_may_begin_with_nothing() -> None:
    tables = (BlockTables(2, 4, 4, 50), BlockTables(2, 4, 4, 50, windowed=True))
    rows = Rows(2, 16, tables, vocab=100)
    row = replace(admission(0), block_tables=(int32(3, 4), int32(0, 5)))
    rows.apply(make_plan(0, admitted=[row]))
    gains = (AppendedBlocks(int32(0), int32(6)), AppendedBlocks(int32(0), int32(7)))
    rows.apply(replace(make_plan(1), appended=gains))
    assert [table.ids[0, :3].tolist() for table in tables] == [[3, 4, 6], [0, 5, 7]]
    rows.apply(make_plan(2, forked=[ForkedRow(1, 0, 1, None, 2)]))
    assert [table.ids[1, :2].tolist() for table in tables] == [[3, 4], [0, 5]]
    assert [table.num_blocks.tolist() for table in tables] == [[3, 2], [3, 2]]


@pytest.mark.parametrize(
    "blocks", [(int32(1),), (int32(1), int32(2, 3)), (int32(0), int32(1)), (int32(1),) * 3]
)
def test_tables_that_do_not_fit_the_kv_groups_are_refused(blocks: tuple[Int32Array, ...]) -> None:
    tables = (BlockTables(2, 4, 4, 50), BlockTables(2, 4, 4, 50, windowed=True))
    rows = Rows(2, 16, tables, vocab=100)
    with pytest.raises(InvariantError):
        rows.apply(make_plan(0, admitted=[replace(admission(0), block_tables=blocks)]))


def progress(rows: Rows, row: int) -> tuple[int, int]:
    return int(rows.num_computed_tokens[row]), int(rows.num_new_tokens[row])


def test_a_row_that_ran_advances_by_one_and_one_that_did_not_waits() -> None:
    rows = new_rows()
    rows.apply(make_plan(0, admitted=[admission(0), admission(1, new=0)]))
    assert rows.running().tolist() == [0]
    rows.append_tokens(rows.running(), int32(7))
    rows.apply(make_plan(1))
    assert progress(rows, 0) == (3, 1)
    assert progress(rows, 1) == (0, 0)
    assert rows.running().tolist() == [0]
    assert rows.tokens[0, :4].tolist() == [0, 1, 2, 7]


def test_an_exception_overrides_the_advance() -> None:
    rows = new_rows()
    rows.apply(make_plan(0, admitted=[admission(0, new=1), admission(1), admission(2)]))
    rows.apply(make_plan(1, exceptions=[(0, 1, 2), (1, 1, 0)]))
    assert progress(rows, 0) == (1, 2)
    assert progress(rows, 1) == (1, 0)
    rows.apply(make_plan(2, exceptions=[(2, 0, 3)]))
    assert progress(rows, 0) == (3, 1)
    assert progress(rows, 1) == (1, 0)
    assert progress(rows, 2) == (0, 3)


def test_a_row_released_and_admitted_in_one_plan_starts_anew() -> None:
    rows = new_rows()
    rows.apply(make_plan(0, admitted=[admission(0), admission(1)]))
    rows.apply(make_plan(1, released=[0, 1], admitted=[admission(0, computed=2)]))
    assert progress(rows, 0) == (2, 1)
    assert rows.running().tolist() == [0]


def test_an_admission_replaces_what_was_in_the_row() -> None:
    rows = new_rows()
    rows.apply(make_plan(0, admitted=[admission(0, count=4)]))
    rows.apply(make_plan(1, admitted=[admission(0, count=2)], appended=[(0, 9)]))
    assert progress(rows, 0) == (0, 2)
    assert rows.num_tokens[0] == 2
    assert rows.block_tables[0].ids[0, :2].tolist() == [1, 9]


def test_an_admission_ends_a_failure() -> None:
    rows = new_rows()
    rows.apply(make_plan(0, admitted=[admission(0), admission(1)]))
    rows.failures.update({0: "bad", 1: "worse"})
    assert rows.running().tolist() == []
    assert rows.failed() == ((0, "bad"), (1, "worse"))
    rows.apply(make_plan(1, admitted=[admission(1)], exceptions=[(0, 0, 0)]))
    assert rows.running().tolist() == [1]
    assert rows.failed() == ()


def test_sampling_parameters_are_kept_exactly() -> None:
    rows = new_rows()
    rows.apply(make_plan(0, admitted=[admission(3)]))
    columns = rows.sampling
    assert columns.seed[3] == 2**64 - 1
    assert columns.temperature[3] == 0.5
    assert (columns.top_k[3], columns.top_p[3], columns.min_p[3]) == (3, 0.9, 0.1)
    assert columns.sequence_index[3] == 3


def test_a_reset_forgets_all_rows_before_it_admits() -> None:
    rows = new_rows()
    rows.apply(make_plan(0, admitted=[admission(0), admission(1)]))
    rows.apply(make_plan(0, reset=True, admitted=[admission(2)]))
    assert rows.running().tolist() == [2]
    with pytest.raises(InvariantError, match="row 0 is released, but was never admitted"):
        rows.apply(make_plan(1, released=[0]))


def run(rows: Rows, plan: StepPlan) -> None:
    rows.apply(plan)
    rows.running()


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (make_plan(1, released=[2]), "row 2 is released, but was never admitted"),
        (make_plan(1, released=[4]), "rows 4 to 4 are named, there are 0 to 3"),
        (make_plan(1, exceptions=[(1, 0, 1)]), "row 1 is excepted, but"),
        (make_plan(1, appended=[(1, 3)]), "row 1 is given blocks, but"),
        (make_plan(1, admitted=[admission(-1)]), "rows -1 to -1"),
        (make_plan(1, admitted=[admission(1, count=0)]), "with 0 tokens, must be 1 to 16"),
        (make_plan(1, admitted=[admission(1, count=17)]), "with 17 tokens, must be 1 to 16"),
        # The row has 3 tokens and 1 block of 4, and ran all of them.
        (make_plan(1), "row 0 is to run 1 tokens behind 3, but has 3 tokens and 1 blocks"),
        (make_plan(1, exceptions=[(0, 0, 4)]), "row 0 is to run 4 tokens behind 0"),
        (make_plan(1, exceptions=[(0, -1, 1)]), "row 0 is to run 1 tokens behind -1"),
        (make_plan(1, exceptions=[(0, 3, -1)]), "row 0 is to run -1 tokens behind 3"),
        (make_plan(1, admitted=[admission(1, count=5)]), "row 1 .* has 5 tokens and 1 blocks"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(plan: StepPlan, message: str) -> None:
    rows = new_rows()
    run(rows, make_plan(0, admitted=[admission(0)]))
    if plan.admitted:
        rows.append_tokens(rows.running(), int32(1))
    with pytest.raises(InvariantError, match=message):
        run(rows, plan)


def test_there_is_one_kv_group() -> None:
    rows, plan = new_rows(), make_plan(0, admitted=[admission(0)])
    two = AppendedBlocks(int32(0), int32(5))
    broken = StepPlan(
        **{name: getattr(plan, name) for name in StepPlan.__slots__} | {"appended": (two, two)}
    )
    with pytest.raises(InvariantError, match="2 KV groups gain blocks, the model has 1"):
        rows.apply(broken)


def test_a_full_row_takes_no_more_tokens() -> None:
    rows = new_rows()
    rows.apply(make_plan(0, admitted=[admission(0, count=16, new=4)]))
    with pytest.raises(InvariantError, match="more than 16 tokens"):
        rows.append_tokens(rows.running(), int32(1))
