"""What every plan keeps, whoever runs in it."""

import numpy as np

from scheduler_svc.core.limits import Limits
from scheduler_svc.core.step_plan import StepPlan


def check_plan(plan: StepPlan, limits: Limits) -> None:
    """Prove what can be seen of a plan alone. The worker proves the rest."""
    assert 1 <= plan.num_tokens <= limits.max_num_batched_tokens
    assert 1 <= plan.num_rows <= limits.max_num_seqs
    assert all(0 <= row.num_new_tokens <= limits.max_row_tokens for row in plan.admitted)
    assert (plan.exception_num_new_tokens <= limits.max_row_tokens).all()
    released = plan.released_rows.tolist()
    admitted = [row.row for row in plan.admitted]
    forked = {fork.row for fork in plan.forked}
    for name, rows in (("released", released), ("admitted", admitted)):
        assert len(set(rows)) == len(rows), f"a row is {name} twice"
    assert forked.isdisjoint(admitted), "a row is forked and admitted"
    assert not {fork.parent_row for fork in plan.forked} & {*released}, "a parent is released"
    sources, destinations = plan.copy_sources.tolist(), plan.copy_destinations.tolist()
    assert len(set(destinations)) == len(destinations)
    assert not {*sources} & {*destinations}
    gained = [block for each in plan.appended for block in each.blocks.tolist()]
    assert len(set(gained)) == len(gained), "a block is appended twice"
    assert {*destinations} <= {*gained}
    assert not (plan.reset and released)


def fingerprint(plan: StepPlan) -> bytes:
    """Return bytes that two plans share only if they say the same."""
    parts: list[object] = [plan.step_id, plan.reset, plan.num_tokens, plan.forked]
    parts += [
        (row.row, row.request_id, row.num_computed_tokens, row.num_new_tokens, row.sequence_index)
        for row in plan.admitted
    ]
    columns = [
        plan.released_rows,
        plan.copy_sources,
        plan.copy_destinations,
        plan.exception_rows,
        plan.exception_num_computed_tokens,
        plan.exception_num_new_tokens,
        *(row.tokens for row in plan.admitted),
        *(table for row in plan.admitted for table in row.block_tables),
        *(column for each in plan.appended for column in (each.rows, each.blocks)),
    ]
    return repr(parts).encode() + np.concatenate(columns).astype(np.int32).tobytes()
