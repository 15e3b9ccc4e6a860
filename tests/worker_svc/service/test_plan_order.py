"""Of all plans there are, only the successor of the last, or a reset, is accepted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_svc.errors import InvariantError
from worker_svc.service.plan_order import PlanOrder
from worker_svc.service.wire import Epoch

ids = st.integers(0, 3)
epochs = st.builds(Epoch, st.integers(0, 1), st.integers(0, 1))


@given(st.lists(st.tuples(ids, epochs, st.booleans()), max_size=12))
def test_a_plan_is_accepted_if_it_is_the_next_one_or_a_reset(
    plans: list[tuple[int, Epoch, bool]],
) -> None:
    order = PlanOrder()
    accepted: list[tuple[int, Epoch]] = []
    for step_id, epoch, reset in plans:
        follows = bool(accepted) and accepted[-1] == (step_id - 1, epoch)
        if (reset and step_id == 0) or (follows and not reset):
            order.check(step_id, epoch, reset=reset)
            accepted.append((step_id, epoch))
        else:
            with pytest.raises(InvariantError, match=f"step {step_id} "):
                order.check(step_id, epoch, reset=reset)
