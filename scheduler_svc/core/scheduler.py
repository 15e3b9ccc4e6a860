"""The scheduler: who runs in the next step, with which blocks, and what a result changes."""

from array import array

from scheduler_svc.core.admission import admit_waiting
from scheduler_svc.core.beam_rows import wake_lanes
from scheduler_svc.core.block_hash import BlockHash, ExtraKeys, HashAlgorithm
from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.consistency import check_state
from scheduler_svc.core.continuation import continue_running
from scheduler_svc.core.counters import Counters
from scheduler_svc.core.departure import end, preempt
from scheduler_svc.core.drafting import add_drafts, rows_to_hold
from scheduler_svc.core.errors import (
    DuplicateRequestError,
    InvalidRequestError,
    InvariantError,
    NeverFitsError,
)
from scheduler_svc.core.hash_algorithms import SHA256
from scheduler_svc.core.journal import Journal
from scheduler_svc.core.kv_groups import FULL_ATTENTION, KvGroup
from scheduler_svc.core.kv_memory import KvMemory
from scheduler_svc.core.length_limit import check_width, length_limit
from scheduler_svc.core.limits import Limits
from scheduler_svc.core.pinning import pin_prefix, unpin
from scheduler_svc.core.pins import Pin
from scheduler_svc.core.prefix_cache import PrefixCache
from scheduler_svc.core.queue_room import check_room
from scheduler_svc.core.request import FinishReason, Request
from scheduler_svc.core.results import apply_result
from scheduler_svc.core.rows import Rows
from scheduler_svc.core.sealing import seal
from scheduler_svc.core.start_estimate import check_start
from scheduler_svc.core.state import SchedulerState
from scheduler_svc.core.state_dump import dump
from scheduler_svc.core.step_draft import StepDraft
from scheduler_svc.core.step_pace import StepPace
from scheduler_svc.core.step_plan import StepOutcome, StepPlan, StepResult
from scheduler_svc.core.victims import VictimPolicy, cheapest
from scheduler_svc.core.waiting_queue import WaitingQueue


class Scheduler:
    """One worker group's queue, rows and blocks.

    Call `schedule` until it returns None, send the plans in order, and give each result to
    `apply` in the same order. Every method is synchronous and takes the time as an argument.

    Invariant: blocks, names and tables agree after each call; `check` proves it.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        enable_prefix_caching: bool = True,
        hash_algorithm: HashAlgorithm = SHA256,
        waiting: WaitingQueue | None = None,
        choose_victim: VictimPolicy = cheapest,
        memory: KvMemory | None = None,
    ) -> None:
        rows, journal = Rows(limits.max_num_seqs, limits.max_model_len), Journal()
        self._state = SchedulerState(
            limits,
            rows,
            WaitingQueue() if waiting is None else waiting,
            journal,
            PrefixCache(
                limits.block_size, rows, journal, hash_algorithm, enabled=enable_prefix_caching
            ),
            choose_victim,
        )
        self._memory = KvMemory() if memory is None else memory
        self._next_sequence = 0

    # What the shell reads.

    @property
    def limits(self) -> Limits:
        """The bounds it was given."""
        return self._state.limits

    @property
    def counters(self) -> Counters:
        """What has been counted since the start."""
        return self._state.counters

    @property
    def pool(self) -> BlockPool | None:
        """The blocks, once a worker group has joined."""
        return self._state.pool

    @property
    def num_in_flight(self) -> int:
        """Plans without a result."""
        return len(self._state.journal)

    @property
    def num_running(self) -> int:
        """Requests with a row."""
        return len(self._state.rows.running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._state.waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Known tokens of the requests in the queue."""
        return self._state.waiting.num_tokens

    @property
    def hit_rate(self) -> float:
        """Share of tokens found in the prefix cache, over the latest 1,000 requests."""
        return self._state.prefixes.hit_rate.rate

    @property
    def num_broken_pins(self) -> int:
        """Pins broken since start, since nothing went on otherwise."""
        return self._memory.pins.num_broken

    @property
    def has_work(self) -> bool:
        """A request is live."""
        return bool(self._state.live)

    # The worker group's life.

    def start_epoch(
        self,
        num_blocks: int,
        root: BlockHash,
        now_ns: int,
        groups: tuple[KvGroup, ...] = FULL_ATTENTION,
    ) -> list[Request]:
        """Take a worker group whose cache of `num_blocks` usable blocks is empty.

        `groups` are the KV groups of its model, at least one.

        Returns: the requests that ended with an error, since they fit this pool no more.
        """
        state = self._state
        self.lose_worker(now_ns)
        state.pool = self._memory.new_pool(num_blocks, groups)
        if state.prefixes.set_root(root):
            for request in state.waiting:
                for each in request.family:
                    each.hashes = []
        unfit = []
        for request in list(state.waiting):
            try:
                request.limit = length_limit(request, state.limits, state.pool)
            except NeverFitsError as error:
                request.error = str(error)
                unfit += end(state, request, FinishReason.ERROR, now_ns)
        state.connected = True
        return unfit

    def rejoin(self, now_ns: int) -> None:
        """Take the same workers back after their connection was lost, with their cache."""
        state = self._state
        if state.pool is None:
            raise InvariantError("a worker group returned that never joined")
        self.lose_worker(now_ns)
        state.connected = True

    def lose_worker(self, now_ns: int) -> None:
        """Preempt everything and forget the steps in flight, with the names that rest on them.

        Confirmed names stay: `rejoin` can hit them, `start_epoch` drops them.
        """
        state = self._state
        state.connected = False
        state.reset = True
        state.next_step_id = 0
        unconfirmed = state.journal.clear()
        for request in reversed(list(state.rows.running)):
            if request.row is not None:  # Beams leave all together.
                preempt(state, request, now_ns)
        for request in state.waiting:
            request.num_pending_tokens = 0
        state.released_rows.clear()
        state.pending_forks.clear()
        if state.pool is not None:
            for block in unconfirmed:
                state.pool.retract(block)

    # A request's life.

    def add(self, request: Request, now_ns: int, pace: StepPace | None = None) -> None:
        """Queue a request. With the pace of recent steps, hopeless deadlines are refused.

        Raises: RequestError, saying why it can never or not now be served. Nothing is
            changed then.
        """
        state = self._state
        if request.key in state.live:
            raise DuplicateRequestError(
                f"request_id {request.request_id!r} is the id of a live request"
            )
        if request.num_prompt_tokens == 0:
            raise InvalidRequestError("prompt", "prompt is empty, must have at least one token")
        check_width(request, state.limits)
        limit = length_limit(request, state.limits, state.pool)
        check_room(state, request, now_ns)
        request.limit = limit
        request.sequence = self._next_sequence
        request.arrival_ns = request.arrival_ns or now_ns
        state.waiting.give_precedence(request)
        if pace is not None:
            check_start(state, request, pace, now_ns)
        self._next_sequence += 1
        state.live[request.key] = request
        state.waiting.add(request)

    def finish(self, request: Request, num_output_tokens: int, now_ns: int) -> None:
        """End a request as stopped, with only its first `num_output_tokens`.

        A root that still runs for its family takes all members with it.
        """
        if request.finish_reason is None:
            end(self._state, request, FinishReason.STOP, now_ns)
            del request.tokens[request.num_prompt_tokens + num_output_tokens :]

    def abort(
        self, request: Request, now_ns: int, reason: FinishReason = FinishReason.ABORT
    ) -> None:
        """End a request at once; its row and blocks are free when this returns.

        A root that still runs for its family takes all members with it.
        """
        if request.finish_reason is None:
            end(self._state, request, reason, now_ns)

    def take_expired(self) -> list[Request]:
        """Return requests whose deadlines passed in the queue since this was last called."""
        expired, self._state.expired = self._state.expired, []
        return expired

    def abort_family(
        self, root: Request, now_ns: int, reason: FinishReason = FinishReason.ABORT
    ) -> None:
        """End every member that lives."""
        for member in root.members:
            self.abort(member, now_ns, reason)

    def flush_cache(self) -> int:
        """Take every block's name away; return how many there were."""
        return self._state.pool.flush() if self._state.pool else 0

    def pin(self, tokens: "array[int]", extra: ExtraKeys, expires_ns: int) -> Pin:
        """Keep what is cached of a prefix until then; see `pin_prefix` for what it raises."""
        return pin_prefix(self._state, tokens, extra, expires_ns)

    def unpin(self, number: int) -> bool:
        """Let go of a pin. False: there is no such pin."""
        return unpin(self._state, number)

    # A step's life.

    def schedule(self, now_ns: int) -> StepPlan | None:
        """Choose the next step's work, or None if there is none now.

        There are no phases. A request has tokens known, some of which are in the cache; a
        step closes as much of that gap as the token budget and the free blocks allow. A long
        gap is a prefill, cut where the budget ends; a gap of one is a decode. A token that a
        step in flight will sample counts as known: the worker fills it in.

        Running requests come first, in order of precedence. When blocks run out, who needs one
        pauses, or a victim gives its own back; nothing is admitted in that step. A waiting
        request may take the place of running ones, if the queue's policy says so; then it is the
        last to be admitted.
        """
        state = self._state
        pool = state.pool
        if pool is None or not state.connected or self.num_in_flight >= state.limits.pipeline_depth:
            return None
        pool.set_time(now_ns)
        draft = StepDraft(budget=state.limits.max_num_batched_tokens)
        if state.beams:
            wake_lanes(state)
        if state.limits.num_draft_tokens:
            draft.held = rows_to_hold(state, pool)
        continue_running(state, draft, pool, now_ns)
        if state.limits.num_draft_tokens:
            add_drafts(state, draft, pool)
        if not (draft.num_preempted or draft.num_paused) or not draft.has_rows:
            admit_waiting(state, draft, pool, now_ns)
        if not draft.has_rows:
            if state.live and not self.num_in_flight:
                if pool.break_oldest_pin():
                    return self.schedule(now_ns)
                raise InvariantError(
                    f"no progress: {self.num_running} running, {self.num_waiting} waiting, "
                    f"{pool.num_free} of {pool.num_blocks} blocks free"
                )
            return None
        return seal(state, draft, pool)

    def apply(self, result: StepResult, now_ns: int) -> StepOutcome:
        """Append what the oldest step in flight sampled; end what has ended.

        Raises: ValueError if the result is not that step's, or has too few or too many
            tokens: the worker's fault. Nothing is changed then.
        """
        return apply_result(self._state, result, now_ns)

    def dump(self, now_ns: int) -> str:
        """Return what is known, as lines for a person. Changes nothing."""
        return dump(self._state, now_ns)

    def check(self) -> None:
        """Prove the invariants. Raises: InvariantError. Cost: O(blocks); for tests."""
        check_state(self._state)
