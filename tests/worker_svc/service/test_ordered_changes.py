"""Changes of adapters take effect behind the plans they stand behind, in order."""

from hypothesis import given
from hypothesis import strategies as st

from pagemill.v1 import worker_pb2
from worker_svc.service.adapter_loading import AdapterLoading, Answer
from worker_svc.service.ordered_changes import OrderedChanges


class Taken(AdapterLoading):
    """Notes the changes that take effect, with the number of plans that have run."""

    def __init__(self) -> None:
        self.num_plans = 0
        self.noted: list[tuple[int, int]] = []

    def take(self, change: worker_pb2.AdapterChange, answer: Answer) -> None:
        self.noted.append((change.number, self.num_plans))


@given(
    behind=st.lists(st.integers(0, 5), max_size=6).map(sorted),
    early=st.lists(st.integers(0, 5), min_size=6, max_size=6),
)
def test_a_change_takes_effect_at_its_plan_or_when_it_comes_later(
    behind: list[int], early: list[int]
) -> None:
    """`behind`: plans before each change, as rank 0 sees them; `early`: how many too early."""
    taken = Taken()
    changes = OrderedChanges(taken, lambda _answer: None)
    arrivals = [max(0, at - by) for at, by in zip(behind, early, strict=False)]
    arrivals = [max(arrivals[: place + 1]) for place in range(len(arrivals))]
    for num_plans in range(6):
        for number, (at, plans) in enumerate(zip(arrivals, behind, strict=True)):
            if at == num_plans:
                change = worker_pb2.AdapterChange(number=number, num_plans_before=plans)
                changes.take(change)
        taken.num_plans += 1
        changes.note_plan()
    assert taken.noted == list(enumerate(behind))
