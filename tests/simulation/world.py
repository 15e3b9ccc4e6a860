"""A scheduler, a worker with a memory, and the wire between them, with everything proved at once.

Whatever is done to the world, in whatever order: each sequence gets the tokens it gets alone.
Every method is one event; who decides what happens next is elsewhere.
"""

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from zlib import crc32

import numpy as np

from fake_worker import FakeWorker
from kv_replica import KvReplica
from scheduler_svc.core.errors import HopelessDeadlineError, RequestError
from scheduler_svc.core.hash_algorithms import HASH_ALGORITHMS
from scheduler_svc.core.kv_events import CacheCleared, KvEventLog
from scheduler_svc.core.request import FinishReason, Request
from scheduler_svc.core.step_pace import StepPace
from scheduler_svc.core.step_plan import StepOutcome, StepPlan, StepResult
from simulation.load import AUDIENCES, Job
from simulation.plan_rules import check_plan, fingerprint
from simulation.refusals import fits, possible_refusals
from simulation.setups import Setup
from simulation.turns import Turns
from simulation.witness import Witness

MODELS = ("one", "another")
"""What workers may have loaded. Names of one are worth nothing to the other."""


@dataclass(slots=True)
class Flight:
    """A plan on its way, and what became of it."""

    plan: StepPlan
    serial: frozenset[int]
    """Rows whose next step depends on a result that is not there yet."""
    result: StepResult | None = None


@dataclass(eq=False)
class Family:
    """A request of a client, with a witness for each of its sequences."""

    root: Request
    job: Job
    witnesses: list[Witness]

    @property
    def is_live(self) -> bool:
        return any(witness.is_live for witness in self.witnesses)


class World:
    """One scheduler's world. `check_every` steps, everything there is to check is checked."""

    def __init__(self, setup: Setup, check_every: int = 1) -> None:
        self.setup = setup
        self.now_ns = 0
        self.num_steps = 0
        self.num_copies = self.num_planted = 0
        """Rows that were made to fail."""
        self.digest = 0
        """Of every plan so far: equal if the same has happened."""
        self.families: list[Family] = []
        """Those that live."""
        self.heard: deque[list[int]] = deque(maxlen=16)
        """Texts that were generated lately."""
        self.pins: set[int] = set()
        self.wire: deque[Flight] = deque()
        self.last_result: StepResult | None = None
        self.is_connected = False
        self.num_blocks = 0
        self.model = MODELS[0]
        self.events = KvEventLog()
        self.memory = setup.memory(self.events)
        self.scheduler = setup.scheduler(self.memory)
        self.pace = StepPace() if setup.has_pace else None
        self.worker = FakeWorker(setup.limits.block_size, 0)
        self._check_every = check_every
        self._replicas = self._new_replicas()
        self._witnesses: dict[Request, Witness] = {}
        self._num_tokens = 0
        self._turns = Turns(setup)

    # Clients.

    def add(self, job: Job) -> bool:
        """Send a request. It is refused exactly if it must be."""
        before = self.scheduler.num_waiting
        request = job.request(self.now_ns)
        expected = possible_refusals(self.scheduler, job)
        error = self._try_to_add(request)
        if isinstance(error, HopelessDeadlineError):
            assert self.pace is not None
            assert job.lifetime_ns is not None
            expected.add(HopelessDeadlineError)
        assert (type(error) if error else None) in expected, f"{error!r} instead of {expected}"
        if error is not None:
            assert self.scheduler.num_waiting == before
            return False
        self.worker.roots[job.name] = job.root
        family = Family(request, job, [Witness(each, job) for each in request.members])
        self.families.append(family)
        self._witnesses |= {each.member: each for each in family.witnesses}
        self._turns.queued(request)
        return True

    def _try_to_add(self, request: Request) -> RequestError | None:
        try:
            self.scheduler.add(request, self.now_ns, self.pace)
        except RequestError as error:
            return error
        return None

    def cancel(self, member: Request) -> None:
        """Abort one sequence; before the fork, the first takes all along."""
        ends = self._ending_with(member)
        self.scheduler.abort(member, self.now_ns)
        self._close(ends, FinishReason.ABORT)

    def cancel_family(self, family: Family) -> None:
        ends = [each for each in family.witnesses if each.is_live]
        self.scheduler.abort_family(family.root, self.now_ns)
        self._close(ends, FinishReason.ABORT)

    def cut(self, member: Request, num_output: int) -> None:
        """End a sequence at a stop string, which the service has found in its text."""
        ends = self._ending_with(member)
        self.scheduler.finish(member, num_output, self.now_ns)
        for each in ends:
            each.verify_end(FinishReason.STOP, num_output)
        self._forget_ended()

    def pin(self, tokens: Sequence[int], job: Job, lifetime_ns: int) -> None:
        with suppress(RequestError):
            request = job.request(0)
            tokens = request.tokens[: len(tokens)]
            pin = self.scheduler.pin(tokens, job.extra, self.now_ns + lifetime_ns)
            assert pin.blocks
            self.pins.add(pin.number)

    def unpin(self, number: int) -> None:
        self._forget_pins()
        assert self.scheduler.unpin(number) == (number in self.pins)
        self._forget_pins()

    def flush(self) -> None:
        self.scheduler.flush_cache()
        self._forget_pins()
        assert not self.pins
        self.check()
        assert not any(replica.names for replica in self._replicas)

    # Steps.

    def plan(self) -> bool:
        """Let the scheduler make a plan. False: it has none now."""
        self.now_ns += 1
        planned = len(self.wire)
        plan = self.scheduler.schedule(self.now_ns)
        expired = self.scheduler.take_expired()
        for request in expired:
            assert request.deadline_ns is not None
            assert request.deadline_ns <= self.now_ns
        self._close(
            [end for each in expired for end in self._ending_with(each)], FinishReason.ABORT
        )
        if plan is None:
            assert self.wire or not self.families or not self.is_connected, "nothing goes on"
            return False
        assert self.is_connected
        assert planned < self.setup.limits.pipeline_depth
        check_plan(plan, self.setup.limits)
        if plan.num_preempted and self.setup.policy != "priority":
            fresh = sum(1 for row in plan.admitted if row.num_new_tokens)
            assert fresh in {0, plan.num_rows}, "others take what was taken from a victim"
        for row in plan.admitted:
            job = self._witness_of(row.row).job
            reads = self.setup.caching and job.read_cache
            assert reads or job.width > 1 or not row.num_computed_tokens, "reads what it must not"
        self._turns.admitted(plan, self.scheduler)
        self.digest = crc32(fingerprint(plan), self.digest)
        serial: set[int] = set()
        for each in (*(flight.plan for flight in self.wire), plan):
            serial -= {row.row for row in each.admitted} | {fork.row for fork in each.forked}
            serial.update(each.serial_rows.tolist() if each is not plan else ())
        self.wire.append(Flight(plan, frozenset(serial)))
        self.num_steps += 1
        if self.num_steps % self._check_every == 0:
            self.check()
        return True

    def execute(self, failing: frozenset[int] = frozenset()) -> bool:
        """Let the worker run the next plan that reached it. False: there is none."""
        flight = next((each for each in self.wire if each.result is None), None)
        if flight is None:
            return False
        result = self.worker.run(flight.plan, failing)
        ran = {number for number, row in self.worker.rows.items() if row.num_new}
        assert not ran & flight.serial, "a serial row runs before its result"
        self.num_planted += len(result.row_errors)
        self.num_copies += len(flight.plan.copy_sources)
        if self.setup.is_terse and result.num_tokens is not None and (result.num_tokens == 1).all():
            result = replace(result, rows=None, num_tokens=None)
        flight.result = result
        return True

    def answer(self) -> bool:
        """Let the scheduler hear of its oldest step. False: none is in flight."""
        if not self.wire:
            return False
        if self.wire[0].result is None:
            self.execute()
        flight = self.wire.popleft()
        assert flight.result is not None
        self.now_ns += 1
        outcome = self.scheduler.apply(flight.result, self.now_ns)
        self.last_result = flight.result
        if self.pace is not None:
            self.pace.note(flight.plan.num_tokens, 2)
        self._hear(outcome)
        return True

    def refuse(self, garbled: StepResult) -> None:
        """Give the scheduler a result that cannot be: it says so, and nothing changes."""
        before = self._picture()
        try:
            self.scheduler.apply(garbled, self.now_ns)
        except ValueError:
            assert self._picture() == before, "a wrong result changed something"
            return
        raise AssertionError(f"a wrong result was taken: {garbled}")

    # The worker's life.

    def lose(self, num_run: int = 0) -> None:
        """Cut the connection. The worker may still run some of what reached it; nobody hears."""
        for _ in range(num_run):
            self.execute()
        self.wire.clear()
        self.scheduler.lose_worker(self.now_ns)
        self.is_connected = False
        assert self.scheduler.num_running == self.scheduler.num_in_flight == 0
        assert self.scheduler.schedule(self.now_ns) is None

    def rejoin(self) -> None:
        """Let the same process return, with its cache."""
        self.wire.clear()
        self.scheduler.rejoin(self.now_ns)
        self.is_connected = True

    def start_epoch(self, num_blocks: int, model: str) -> None:
        """Let another process join, whose cache is empty."""
        self.wire.clear()
        self.num_blocks, self.model = num_blocks, model
        root = self.setup.root(model)
        roots = self.worker.roots
        self.worker = FakeWorker(self.setup.limits.block_size, num_blocks, self.setup.groups)
        self.worker.roots = roots
        live = self._live()
        ended = self.scheduler.start_epoch(num_blocks, root, self.now_ns, self.setup.groups)
        self.is_connected = True
        for each in live:
            assert self._fits(each) in {None, each.member not in ended}
        self._close([self._witnesses[each] for each in ended], FinishReason.ERROR)
        self._forget_pins()
        assert not self.pins
        self._follow()
        assert not any(replica.names for replica in self._replicas)
        self._replicas = self._new_replicas()
        self.check()

    # The end.

    def drain(self) -> None:
        """Run to the end, within a bound of turns."""
        work = sum(
            len(each.job.prompt) + 2 * (each.job.max_output or self.setup.limits.max_model_len)
            for each in self._live()
        )
        turns, most = 0, 50 + 3 * work
        while self.families or self.wire:
            while self.plan():
                pass
            self.answer()
            turns += 1
            assert turns <= most, f"{len(self.families)} still wait or run after {turns} turns"
        assert not self.scheduler.has_work
        assert self.scheduler.num_waiting == self.scheduler.num_waiting_tokens == 0
        self.check()
        if (pool := self.scheduler.pool) is not None:
            assert pool.num_used == 0
            pool.set_time(self.now_ns + 1_000_000)
            assert pool.num_pinned == 0
            assert pool.num_free == self.num_blocks
        self.check()

    def check(self) -> None:
        """Prove what must hold between any two events."""
        self.scheduler.check()
        assert self.scheduler.has_work == bool(self.families)
        assert self.scheduler.counters.generation_tokens == self._num_tokens
        assert self.scheduler.num_broken_pins == 0
        self._follow()
        pool = self.scheduler.pool
        for number, replica in enumerate(self._replicas):
            found = {name for name in replica.names if pool and pool.lookup(name, number)}
            assert len(found) == len(replica.names), "events and index differ"
        known = sum(len(replica.names) for replica in self._replicas)
        assert known == (len(pool._index) if pool else 0), "events and index differ"

    def _hear(self, outcome: StepOutcome) -> None:
        reasons = {}
        for member, token in zip(outcome.requests, outcome.tokens, strict=True):
            reasons[member] = self._witnesses[member].hear(token)
        self._num_tokens += len(outcome.tokens)
        assert len(set(outcome.finished)) == len(outcome.finished)
        for member in outcome.finished:
            reason = reasons.pop(member, None)
            witness = self._witnesses[member]
            beam = witness.job.beam
            if beam and member.finish_reason is not FinishReason.ERROR:
                self._num_tokens += witness.verify_search(beam)
            elif reason is None:
                assert self.num_planted
                assert member.error == "planted"
                witness.verify_end(FinishReason.ERROR)
            else:
                assert member.stop_token_id == witness.stop_token_id()
                witness.verify_end(reason)
        assert not any(reasons.values()), "a sequence goes on behind its end"
        if outcome.finished:
            self._forget_ended()

    def _close(self, ends: Sequence[Witness], reason: FinishReason) -> None:
        for witness in ends:
            witness.verify_end(reason)
        if ends:
            self._forget_ended()

    def _forget_ended(self) -> None:
        for family in self.families:
            for witness in family.witnesses:
                if witness.is_live or witness.member not in self._witnesses:
                    continue
                del self._witnesses[witness.member]
                if witness.output:
                    self.heard.append([*family.job.prompt, *witness.output])
        self.families = [family for family in self.families if family.is_live]

    def _family_of(self, member: Request) -> Family:
        return next(each for each in self.families if each.root is member.root)

    def _ending_with(self, member: Request) -> list[Witness]:
        """Return who ends if a member does: before the fork, all with the first."""
        family = self._family_of(member)
        if member is not family.root or any(each.output for each in family.witnesses):
            return [self._witnesses[member]]
        return [each for each in family.witnesses if each.member in self._witnesses]

    def _witness_of(self, row: int) -> Witness:
        owner = self.scheduler._state.rows.owner(row)
        return self._witnesses[owner.root if owner.root.beam else owner]

    def _live(self) -> list[Witness]:
        return [each for family in self.families for each in family.witnesses if each.is_live]

    def _fits(self, witness: Witness) -> bool | None:
        family = self._family_of(witness.member)
        forked = any(each.output for each in family.witnesses)
        width = 1 if forked else family.job.width
        return fits(self.scheduler, family.job, width, len(witness.output))

    def _new_replicas(self) -> list[KvReplica]:
        """Return who follows the events, one for each KV group."""
        algorithm, root = HASH_ALGORITHMS[self.setup.algorithm], self.setup.root(self.model)
        return [KvReplica(algorithm, root, extras=AUDIENCES) for _ in self.setup.groups]

    def _follow(self) -> None:
        events = self.events.take()
        for number, replica in enumerate(self._replicas):
            replica.apply(
                event
                for event in events
                if isinstance(event, CacheCleared) or event.group == number
            )

    def _forget_pins(self) -> None:
        self.pins -= {pin.number for pin in self.memory.pins.take_ended()}

    def _picture(self) -> object:
        return (
            self.scheduler.dump(self.now_ns),
            repr(self.scheduler.counters),
            [each.tokens.tobytes() for each in self._witnesses],
            self.scheduler._state.rows.tokens.tobytes(),
            np.array(self.scheduler._state.rows._progress).tobytes(),
        )
