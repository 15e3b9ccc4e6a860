"""The real core driven through a load in virtual time."""

from array import array
from collections.abc import Callable, Sequence

import numpy as np

from scheduler_svc.core.beam_options import BeamOptions
from scheduler_svc.core.block_hash import PoolIdentity
from scheduler_svc.core.errors import InvalidRequestError, InvariantError
from scheduler_svc.core.eviction import EvictionPolicyMaker, LruEviction
from scheduler_svc.core.hash_algorithms import SHA256
from scheduler_svc.core.kv_memory import KvMemory
from scheduler_svc.core.limits import Limits
from scheduler_svc.core.request import Request, Sampling, Stopping
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step_plan import StepOutcome, StepResult
from scheduler_svc.core.victims import VictimPolicy, cheapest
from scheduler_svc.simulate.report import Int64Array, Memory, Report, Totals, Waits, make_report
from scheduler_svc.simulate.simulated_worker import (
    END_OF_SEQUENCE,
    ModelWish,
    SimulatedStep,
    SimulatedWorker,
)
from scheduler_svc.simulate.step_cost import StepCost
from scheduler_svc.simulate.workload import FIRST_OWN_ID, Arrival, prompt_ids

_SAMPLING = Sampling(temperature=0.0)
_STOPPING = Stopping(max_output_tokens=None, eos_token_ids=frozenset({END_OF_SEQUENCE}))


class PagedReplay:
    """A scheduler, a simulated worker, and the time between them.

    A plan is made when the worker would otherwise be idle: as the step before it ends and, at
    depth 2, before that step's result is applied. Planning itself takes no virtual time.
    """

    def __init__(
        self,
        load: Sequence[Arrival],
        limits: Limits,
        slots: int,
        cost: StepCost,
        *,
        chunk_tokens: int,
        enable_prefix_caching: bool = True,
        choose_victim: VictimPolicy = cheapest,
        eviction: EvictionPolicyMaker = LruEviction,
    ) -> None:
        """Take a load in order of arrival; of `slots`, those that make whole blocks are used."""
        self._slots = slots
        self._block_size = limits.block_size
        self._cost = cost
        self._scheduler = Scheduler(
            limits,
            enable_prefix_caching=enable_prefix_caching,
            choose_victim=choose_victim,
            memory=KvMemory(eviction),
        )
        root = SHA256.root("", PoolIdentity("", "", limits.block_size, ""))
        self._scheduler.start_epoch(slots // limits.block_size, root, 0)
        self._coming = [
            _request(str(number), arrival, prompt_ids(arrival, number, chunk_tokens), limits)
            for number, arrival in enumerate(load)
        ]
        self._width = max((request.width for request in self._coming), default=1)
        self._wishes = {
            str(number): _wish(arrival, FIRST_OWN_ID + number * self._width)
            for number, arrival in enumerate(load)
        }
        self._worker = SimulatedWorker(limits.max_num_seqs, limits.block_size, self._wishes)
        self._num_added = 0
        self._accepted: list[Request] = []
        self._flying: list[tuple[int, StepResult]] = []
        self._memory, self._waits = Memory(), Waits()
        self._last_token_ns: Int64Array = np.zeros(len(load) * self._width, dtype=np.int64)
        self._prompt_tokens = 0
        self._num_ended = 0

    @property
    def num_blocks_held(self) -> int:
        """Blocks that requests hold now, each counted once."""
        pool = self._scheduler.pool
        return 0 if pool is None else pool.num_used

    def run(self, progress: Callable[[float], None]) -> Report:
        """Replay the load to its last token."""
        now_ns = 0
        while self._num_added < len(self._coming) or self._scheduler.has_work:
            self._add_arrived(now_ns)
            if not self._flying:
                self._plan(now_ns)
            if self._flying:
                now_ns, result = self._flying[0]
                self._add_arrived(now_ns)
                self._plan(now_ns)
                del self._flying[0]
                self._note(self._scheduler.apply(result, now_ns), now_ns)
            elif self._num_added < len(self._coming):
                now_ns = max(now_ns, self._coming[self._num_added].arrival_ns)
            elif self._scheduler.has_work:
                raise InvariantError("requests are left, and nothing is planned")
            progress(self._num_ended / len(self._coming))
        return self._report(now_ns)

    def _add_arrived(self, now_ns: int) -> None:
        while self._num_added < len(self._coming):
            request = self._coming[self._num_added]
            if request.arrival_ns > now_ns:
                return
            self._num_added += 1
            try:
                self._scheduler.add(request, now_ns)
            except InvalidRequestError:
                self._num_ended += 1
            else:
                self._accepted.append(request)

    def _plan(self, now_ns: int) -> None:
        measured = not self._all_admitted
        plan = self._scheduler.schedule(now_ns)
        if plan is None:
            return
        step = self._worker.run(plan)
        step_ns = self._cost.step_ns(step.num_tokens, step.num_context_tokens)
        self._flying.append((now_ns + step_ns, step.result))
        if measured:
            self._measure(step, step_ns)

    @property
    def _all_admitted(self) -> bool:
        """Whether nobody comes or waits who has not run before; first come, first served."""
        if self._num_added < len(self._coming):
            return False
        return not self._accepted or self._accepted[-1].first_scheduled_ns is not None

    def _measure(self, step: SimulatedStep, step_ns: int) -> None:
        allocated = self.num_blocks_held * self._block_size
        self._memory.add(
            step_ns,
            num_rows=step.num_rows,
            slots_filled=allocated - step.num_slots_unfilled,
            slots_allocated=allocated,
            table_slots=step.num_table_blocks * self._block_size,
        )

    def _note(self, outcome: StepOutcome, now_ns: int) -> None:
        for request in outcome.finished:
            if request.root is not request:
                continue
            self._num_ended += 1
            self._prompt_tokens += request.num_prompt_tokens
            if request.first_token_ns is not None:
                self._waits.first_tokens.append(request.first_token_ns - request.arrival_ns)
        numbers = [each.sequence * self._width + each.index for each in outcome.requests]
        sequences = np.array(numbers, dtype=np.int64)
        last_ns = self._last_token_ns[sequences]
        self._last_token_ns[sequences] = now_ns
        followers = last_ns[last_ns > 0]
        if len(followers):
            self._waits.add_gaps(now_ns - followers)

    def _report(self, now_ns: int) -> Report:
        counters = self._scheduler.counters
        return make_report(
            self._slots,
            self._memory,
            self._waits,
            Totals(
                requests=len(self._accepted),
                refused=len(self._coming) - len(self._accepted),
                prompt_tokens=self._prompt_tokens,
                generation_tokens=counters.generation_tokens,
                steps=counters.steps,
                virtual_ns=now_ns - self._coming[0].arrival_ns,
                prefix_queries=counters.prefix_queries,
                prefix_hits=counters.prefix_hits,
                preemptions=counters.preemptions,
                recomputed_tokens=counters.recomputed_tokens,
                pauses=counters.pauses,
            ),
        )


def _request(request_id: str, arrival: Arrival, prompt: "array[int]", limits: Limits) -> Request:
    stopping, beam = _STOPPING, None
    if arrival.beams is not None:
        room = max(1, limits.max_model_len - arrival.input_length)
        stopping = Stopping(max_output_tokens=min(arrival.output_length, room))
        beam = BeamOptions(arrival.beams.shape[1])
    return Request(
        request_id,
        prompt,
        _SAMPLING,
        stopping,
        arrival_ns=round(arrival.arrival_s * 1e9),
        num_sequences=1 + len(arrival.sibling_lengths),
        beam=beam,
    )


def _wish(arrival: Arrival, token: int) -> ModelWish:
    outputs = (arrival.output_length, *arrival.sibling_lengths)
    lengths = tuple(arrival.input_length + length for length in outputs)
    return ModelWish(token, lengths, arrival.input_length, arrival.beams)
