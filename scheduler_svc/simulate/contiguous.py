"""Servers that keep a sequence in one piece, reserved when it is admitted.

First come, first served; a new request joins between two steps, and its whole prompt runs in
its first one. Nothing is ever preempted: the space of an admitted request is its own.
"""

from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from scheduler_svc.simulate.buddy import BuddyAllocator, Region
from scheduler_svc.simulate.report import Memory, Report, Totals, Waits, make_report
from scheduler_svc.simulate.step_cost import StepCost
from scheduler_svc.simulate.workload import Arrival

Reservation = Callable[[Arrival, int], int]
"""Slots for a request, given the model's longest."""


def _whole_length(arrival: Arrival, max_model_len: int) -> int:
    return max_model_len


def _output_to_a_power_of_two(arrival: Arrival, max_model_len: int) -> int:
    room = arrival.input_length + (1 << (arrival.output_length - 1).bit_length())
    return min(room, max_model_len)


def _own_length(arrival: Arrival, max_model_len: int) -> int:
    return min(arrival.input_length + arrival.output_length, max_model_len)


# Source: arXiv:2309.06180, section 6.1: Orca (Max), (Pow2) and (Oracle). The latter two know how
# long an output will be, which no server does.
RESERVATIONS: dict[str, Reservation] = {
    "max": _whole_length,
    "pow2": _output_to_a_power_of_two,
    "oracle": _own_length,
}


class ContiguousReplay:
    """A load against reservations.

    Cost: O(1) a step. All running rows gain a token a step, so sums suffice.
    """

    def __init__(
        self,
        load: Sequence[Arrival],
        reservation: Reservation,
        slots: int,
        cost: StepCost,
        *,
        max_model_len: int,
        max_num_seqs: int,
    ) -> None:
        """Take a load in order of arrival."""
        self._memory_map = BuddyAllocator(slots)
        self._slots = slots
        self._cost = cost
        self._max_num_seqs = max_num_seqs
        self._waiting: deque[tuple[Arrival, int]] = deque()
        """Requests that come or wait, with their reservations."""
        for arrival in load:
            reserved = reservation(arrival, max_model_len)
            if arrival.input_length < max_model_len and self._memory_map.fits(reserved):
                self._waiting.append((arrival, reserved))
        self._num_requests = len(self._waiting)
        self._num_refused = len(load) - self._num_requests
        self._max_model_len = max_model_len
        self._running: list[tuple[int, int, Region, int]] = []
        """A heap of (step after which it ends, number, its region, its length then)."""
        self._num_steps = 0
        self._num_tokens_stored = 0
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._memory, self._waits = Memory(), Waits()

    def run(self, progress: Callable[[float], None]) -> Report:
        """Replay the load to its last token."""
        now_ns = first_ns = _arrival_ns(self._waiting[0][0]) if self._waiting else 0
        while self._waiting or self._running:
            num_old = len(self._running)
            measured = bool(self._waiting)
            admitted = self._admit(now_ns)
            if not self._running:
                now_ns = _arrival_ns(self._waiting[0][0])
                continue
            step_ns = self._step(num_old, sum(a.input_length for a in admitted), measured=measured)
            now_ns += step_ns
            for arrival in admitted:
                self._waits.first_tokens.append(now_ns - _arrival_ns(arrival))
            if num_old:
                self._waits.add_equal_gaps(step_ns, num_old)
            self._end_rows()
            progress(1 - (len(self._waiting) + len(self._running)) / self._num_requests)
        totals = Totals(
            requests=self._num_requests,
            refused=self._num_refused,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            steps=self._num_steps,
            virtual_ns=now_ns - first_ns,
        )
        return make_report(self._slots, self._memory, self._waits, totals)

    def _admit(self, now_ns: int) -> list[Arrival]:
        admitted: list[Arrival] = []
        while self._waiting and len(self._running) < self._max_num_seqs:
            arrival, reserved = self._waiting[0]
            if _arrival_ns(arrival) > now_ns:
                break
            region = self._memory_map.allocate(reserved)
            if region is None:
                break
            self._waiting.popleft()
            length = min(arrival.input_length + arrival.output_length, self._max_model_len)
            end = self._num_steps + length - arrival.input_length
            number = self._num_requests - len(self._waiting)
            heappush(self._running, (end, number, region, length))
            admitted.append(arrival)
            self._prompt_tokens += arrival.input_length
        return admitted

    def _step(self, num_old: int, num_prompt_tokens: int, *, measured: bool) -> int:
        """Run every row once, and return how long that took."""
        self._num_steps += 1
        num_tokens = num_old + num_prompt_tokens
        # A row's last token is sampled, but never stored.
        self._num_tokens_stored += num_tokens
        self._generation_tokens += len(self._running)
        step_ns = self._cost.step_ns(num_tokens, self._num_tokens_stored)
        if measured:
            self._memory.add(
                step_ns,
                num_rows=len(self._running),
                slots_filled=self._num_tokens_stored,
                slots_allocated=self._memory_map.num_allocated,
                table_slots=self._memory_map.num_allocated,
            )
        return step_ns

    def _end_rows(self) -> None:
        while self._running and self._running[0][0] <= self._num_steps:
            _, _, region, length = heappop(self._running)
            self._memory_map.release(region)
            self._num_tokens_stored -= length - 1


def _arrival_ns(arrival: Arrival) -> int:
    return round(arrival.arrival_s * 1e9)
