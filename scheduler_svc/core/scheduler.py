"""The scheduler: who runs in the next step, with which blocks, and what a result changes."""

import numpy as np

from scheduler_svc.core.block_hash import BlockHash, HashAlgorithm
from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.counters import Counters
from scheduler_svc.core.errors import (
    DuplicateRequestError,
    InvalidRequestError,
    InvariantError,
    NeverFitsError,
    QueueFullError,
)
from scheduler_svc.core.free_block_queue import BlockId
from scheduler_svc.core.hash_algorithms import SHA256
from scheduler_svc.core.journal import FlyingStep, Journal
from scheduler_svc.core.length_limit import length_limit
from scheduler_svc.core.limits import Limits
from scheduler_svc.core.prefix_cache import PrefixCache
from scheduler_svc.core.request import FinishReason, Request, RequestKey
from scheduler_svc.core.rows import Rows
from scheduler_svc.core.skip_ahead import SkipAhead
from scheduler_svc.core.step_draft import StepDraft
from scheduler_svc.core.step_plan import (
    AdmittedRow,
    Int32Array,
    StepOutcome,
    StepPlan,
    StepResult,
)
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
    ) -> None:
        self.limits = limits
        self.counters = Counters()
        self._rows = Rows(limits.max_num_seqs, limits.max_model_len)
        self._waiting = WaitingQueue() if waiting is None else waiting
        self._choose_victim = choose_victim
        self._live: dict[RequestKey, Request] = {}
        self._journal = Journal()
        self._prefixes = PrefixCache(
            limits.block_size,
            self._rows,
            self._journal,
            hash_algorithm,
            enabled=enable_prefix_caching,
        )
        self._pool: BlockPool | None = None
        self._connected = False
        self._reset = True
        self._next_step_id = 0
        self._next_sequence = 0
        self._released_rows: list[int] = []

    # What the shell reads.

    @property
    def pool(self) -> BlockPool | None:
        """The blocks, once a worker group has joined."""
        return self._pool

    @property
    def num_in_flight(self) -> int:
        """Plans without a result."""
        return len(self._journal)

    @property
    def num_running(self) -> int:
        """Requests with a row."""
        return len(self._rows.running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Known tokens of the requests in the queue."""
        return self._waiting.num_tokens

    @property
    def has_work(self) -> bool:
        """A request is live."""
        return bool(self._live)

    # The worker group's life.

    def start_epoch(self, num_blocks: int, root: BlockHash, now_ns: int) -> list[Request]:
        """Take a worker group whose cache of `num_blocks` usable blocks is empty.

        Returns: the requests that ended with an error, since they fit this pool no more.
        """
        self.lose_worker(now_ns)
        self._pool = BlockPool(num_blocks)
        if self._prefixes.set_root(root):
            for request in self._waiting:
                request.hashes.clear()
        unfit = []
        for request in list(self._waiting):
            try:
                request.limit = length_limit(request, self.limits, self._pool)
            except NeverFitsError as error:
                request.error = str(error)
                self._end(request, FinishReason.ERROR, now_ns)
                unfit.append(request)
        self._connected = True
        return unfit

    def rejoin(self, now_ns: int) -> None:
        """Take the same workers back after their connection was lost, with their cache."""
        if self._pool is None:
            raise InvariantError("a worker group returned that never joined")
        self.lose_worker(now_ns)
        self._connected = True

    def lose_worker(self, now_ns: int) -> None:
        """Preempt everything and forget the steps in flight, with the names that rest on them.

        Confirmed names stay: `rejoin` can hit them, `start_epoch` drops them.
        """
        self._connected = False
        self._reset = True
        self._next_step_id = 0
        unconfirmed = self._journal.clear()
        for request in reversed(list(self._rows.running)):
            self._preempt(request, now_ns)
        for request in self._waiting:
            request.num_pending_tokens = 0
        self._released_rows.clear()
        if self._pool is not None:
            for block in unconfirmed:
                self._pool.retract(block)

    # A request's life.

    def add(self, request: Request, now_ns: int) -> None:
        """Queue a request.

        Raises: RequestError, saying why it can never or not now be served. Nothing is
            changed then.
        """
        if request.key in self._live:
            raise DuplicateRequestError(
                f"request_id {request.request_id!r} is the id of a live request"
            )
        if request.num_prompt_tokens == 0:
            raise InvalidRequestError("prompt", "prompt is empty, must have at least one token")
        limit = length_limit(request, self.limits, self._pool)
        self._check_room(request)
        request.limit = limit
        request.sequence = self._next_sequence
        request.arrival_ns = request.arrival_ns or now_ns
        self._next_sequence += 1
        self._live[request.key] = request
        self._waiting.add(request)

    def _check_room(self, request: Request) -> None:
        count, tokens = len(self._waiting), self._waiting.num_tokens
        limits = self.limits
        if count >= limits.max_waiting_requests:
            raise QueueFullError(
                f"{count} requests wait, at most {limits.max_waiting_requests} may"
            )
        most = limits.max_waiting_tokens
        if most is not None and count and tokens + request.num_tokens > most:
            raise QueueFullError(
                f"{tokens} tokens wait, with the {request.num_tokens} of this request they would "
                f"be more than {most}"
            )

    def finish(self, request: Request, num_output_tokens: int, now_ns: int) -> None:
        """End a request as stopped, with only its first `num_output_tokens`."""
        if request.finish_reason is None:
            self._end(request, FinishReason.STOP, now_ns)
            del request.tokens[request.num_prompt_tokens + num_output_tokens :]

    def abort(
        self, request: Request, now_ns: int, reason: FinishReason = FinishReason.ABORT
    ) -> None:
        """End a request at once; its row and blocks are free when this returns."""
        if request.finish_reason is None:
            self._end(request, reason, now_ns)

    def flush_cache(self) -> int:
        """Take every block's name away; return how many there were."""
        return self._pool.flush() if self._pool else 0

    # A step's life.

    def schedule(self, now_ns: int) -> StepPlan | None:
        """Choose the next step's work, or None if there is none now.

        There are no phases. A request has tokens known, some of which are in the cache; a
        step closes as much of that gap as the token budget and the free blocks allow. A long
        gap is a prefill, cut where the budget ends; a gap of one is a decode. A token that a
        step in flight will sample counts as known: the worker fills it in.

        Running requests come first, in order of precedence. When blocks run out a victim gives its
        own back, and nothing is admitted in that step. A waiting request may take the place of
        running ones, if the queue's policy says so; then it is the last to be admitted.
        """
        pool = self._pool
        if pool is None or not self._connected or self.num_in_flight >= self.limits.pipeline_depth:
            return None
        draft = StepDraft(budget=self.limits.max_num_batched_tokens)
        self._continue_running(draft, pool, now_ns)
        if not draft.num_preempted or not draft.has_rows:
            self._admit_waiting(draft, pool, now_ns)
        if not draft.has_rows:
            if self._live and not self.num_in_flight:
                raise InvariantError(
                    f"no progress: {self.num_running} running, {self.num_waiting} waiting, "
                    f"{pool.num_free} of {pool.num_blocks} blocks free"
                )
            return None
        return self._seal(draft, pool)

    def apply(self, result: StepResult, now_ns: int) -> StepOutcome:
        """Append what the oldest step in flight sampled; end what has ended.

        Raises: ValueError if the result is not that step's, or has too few or too many
            tokens: the worker's fault. Nothing is changed then.
        """
        if (pool := self._pool) is None:
            raise ValueError(f"result of step {result.step_id} came before any worker")
        failed = {row for row, _ in result.row_errors}
        step = self._take_step(result, failed)
        self.counters.steps += 1
        outcome = StepOutcome(step.step_id, [], [], [])
        for row, reason in result.row_errors:
            self._fail_row(step, row, reason, pool, now_ns, outcome)
        sampling = step.samples & ~np.isin(step.rows, list(failed)) if failed else step.samples
        rows, sampled = step.rows[sampling], result.tokens
        alive = self._rows.generation[rows] == step.generations[sampling]
        if not alive.all():
            for row, token in zip(rows[~alive].tolist(), sampled[~alive].tolist(), strict=True):
                if (request := step.orphans.get(row)) is not None:
                    self._append_to_waiting(request, token, step.step_id, now_ns, outcome)
            rows, sampled = rows[alive], sampled[alive]
        if len(rows):
            self._append(rows, sampled, step.step_id, pool, now_ns, outcome)
        return outcome

    def check(self) -> None:
        """Prove the invariants. Raises: InvariantError. Cost: O(blocks); for tests."""
        if self._pool is not None:
            self._pool.check([request.blocks for request in self._live.values()])
        running = self._rows.running
        if sorted(r.precedence for r in running) != [r.precedence for r in running]:
            raise InvariantError("running requests are not in order of precedence")
        if self._waiting.num_tokens != sum(r.num_tokens for r in self._waiting):
            raise InvariantError("waiting tokens miscounted")
        if {*map(id, running), *map(id, self._waiting)} != set(map(id, self._live.values())):
            raise InvariantError("a live request neither runs nor waits")

    # Scheduling.

    def _continue_running(self, draft: StepDraft, pool: BlockPool, now_ns: int) -> None:
        """Give running requests their next tokens, preempting victims if blocks run out."""
        rows, block_size, most = self._rows, self.limits.block_size, self.limits.max_row_tokens
        while True:
            order = rows.order
            known = rows.num_tokens[order] + rows.num_pending[order]
            computed = rows.num_computed[order]
            # A row whose last token is already on its way has nothing left to compute.
            gap = np.where(known < rows.limit[order], np.minimum(known - computed, most), 0)
            before = np.cumsum(gap) - gap
            count = np.clip(gap, 0, np.maximum(draft.budget - before, 0)).astype(np.int32)
            held = rows.num_blocks[order]
            needed = np.where(count > 0, -(-(computed + count) // block_size) - held, 0)
            if int(needed.sum()) <= pool.num_free:
                break
            self._preempt(self._choose_victim(rows.running, rows, pool, block_size), now_ns)
            draft.num_preempted += 1
        draft.rows, draft.num_new = order, count
        draft.budget -= draft.num_running_tokens
        growing = np.flatnonzero(needed)
        if len(growing):
            self._grow(draft, pool, order[growing].tolist(), needed[growing].tolist())

    def _grow(self, draft: StepDraft, pool: BlockPool, rows: list[int], counts: list[int]) -> None:
        fresh = iter(pool.allocate(sum(counts)))
        for row, count in zip(rows, counts, strict=True):
            blocks = [next(fresh) for _ in range(count)]
            self._rows.owner(row).blocks += blocks
            self._rows.num_blocks[row] += count
            draft.appended_rows += [row] * count
            draft.appended_blocks += blocks

    def _admit_waiting(self, draft: StepDraft, pool: BlockPool, now_ns: int) -> None:
        """Give rows to waiting requests in their turn, while everything suffices."""
        if not len(self._waiting):
            return
        self._look_ahead(draft)
        skip = SkipAhead(self.limits, now_ns)
        for request in self._waiting.in_turn():
            if request.num_pending_tokens:
                return
            if self._is_one_long_too_many(request, draft, pool):
                if not skip.hold(request, for_memory=False):
                    return
                continue
            claimed = skip.is_head and self._claim(request, draft, pool, now_ns)
            if draft.budget <= 0 or not self._rows.has_room:
                return
            if skip.allows(request) and self._admit(request, draft, pool):
                self._waiting.remove(request)
                if request.first_scheduled_ns is None:
                    request.first_scheduled_ns = now_ns
                    request.first_step_id = self._next_step_id
                if claimed or not skip.passed():
                    return
            elif not skip.hold(request, for_memory=True):
                return

    def _look_ahead(self, draft: StepDraft) -> None:
        """Note what the rows that run will still need for the tokens they know."""
        rows, block_size = self._rows, self.limits.block_size
        order = draft.rows
        known = rows.num_tokens[order]
        lacking = -(-known // block_size) - rows.num_blocks[order]
        draft.promised_blocks = int(np.maximum(lacking, 0).sum())
        gap = known - rows.num_computed[order]
        draft.num_long_prefills = int(np.count_nonzero(gap > self.limits.max_row_tokens))

    def _is_one_long_too_many(self, request: Request, draft: StepDraft, pool: BlockPool) -> bool:
        most = self.limits.max_long_prefills
        if not most or draft.num_long_prefills < most:
            return False
        num_hit = len(self._prefixes.find(request, pool)) * self.limits.block_size
        return request.num_tokens - num_hit > self.limits.max_row_tokens

    def _claim(self, request: Request, draft: StepDraft, pool: BlockPool, now_ns: int) -> bool:
        """Preempt running requests that yield to a waiting one, if that lets it in.

        False, and nothing changed, if it need not or does not.
        """
        rows, block_size = self._rows, self.limits.block_size
        yielding = self._waiting.yielding_to(request, rows.running)
        if not yielding:
            return False
        hits = self._prefixes.find(request, pool)
        lacking = self._num_blocks_wanted(request, hits, draft, pool) - pool.num_free
        has_room, budget = rows.has_room, draft.budget
        victims: list[Request] = []
        while lacking > 0 or not has_room:
            if not yielding:
                return False
            victim = self._choose_victim(yielding, rows, pool, block_size)
            yielding.remove(victim)
            victims.append(victim)
            row, has_room = rows.row_of(victim), True
            promised = -(-int(rows.num_tokens[row]) // block_size) - len(victim.blocks)
            lacking -= pool.count_own(set(victim.blocks).difference(hits)) + max(0, promised)
            budget += int(draft.num_new[draft.rows == row].sum())
        if budget <= 0 or not victims:
            return False
        for victim in victims:
            draft.drop(rows.row_of(victim))
            self._preempt(victim, now_ns)
            draft.num_preempted += 1
        self._look_ahead(draft)
        return True

    def _num_blocks_wanted(
        self, request: Request, hits: list[BlockId], draft: StepDraft, pool: BlockPool
    ) -> int:
        """Return how many blocks must be free to admit a request.

        Its whole known length must fit, beside those of the rows that run, or a long prompt
        would be preempted half way.
        """
        whole = -(-request.num_tokens // self.limits.block_size)
        wanted = whole - len(hits) + pool.count_idle(hits) + draft.promised_blocks
        if request.num_preemptions and self._rows.running:
            wanted += max(1, int(self.limits.watermark * pool.num_blocks))
        return wanted

    def _admit(self, request: Request, draft: StepDraft, pool: BlockPool) -> bool:
        """Give a request blocks and a row. False, and nothing changed, if they do not suffice."""
        block_size = self.limits.block_size
        hits = self._prefixes.find(request, pool)
        if self._num_blocks_wanted(request, hits, draft, pool) > pool.num_free:
            return False
        num_hit = len(hits) * block_size
        gap = request.num_tokens - num_hit
        count = min(gap, draft.budget, self.limits.max_row_tokens)
        pool.share(hits)
        needed = -(-(num_hit + count) // block_size) - len(hits)
        request.blocks = [*hits, *pool.allocate(needed)]
        self._count_admission(request, num_hit)
        row = self._rows.take(request, num_hit + count, count)
        draft.published += self._prefixes.publish_prompt(row, request, len(hits), pool)
        draft.add(request, count)
        draft.promised_blocks += -(-request.num_tokens // block_size) - len(request.blocks)
        draft.num_long_prefills += gap > self.limits.max_row_tokens
        self._waiting.charge(request, count)
        return True

    def _count_admission(self, request: Request, num_hit: int) -> None:
        request.admitted_tokens = num_hit
        request.tokens_when_admitted = request.num_tokens
        counters = self.counters
        if request.first_scheduled_ns is None:
            request.num_cached_tokens = num_hit
            counters.prompt_tokens += request.num_prompt_tokens
            if self._prefixes.enabled and request.read_cache:
                counters.prefix_queries += request.num_tokens
                counters.prefix_hits += num_hit
        else:
            again = max(0, request.computed_before_preemption - num_hit)
            request.num_recomputed_tokens += again
            counters.recomputed_tokens += again

    def _seal(self, draft: StepDraft, pool: BlockPool) -> StepPlan:
        """Advance the rows, enter the step in the journal and return the plan."""
        rows = self._rows
        order, count = draft.rows, draft.num_new
        expected = (rows.num_last_new[order] > 0).astype(np.int32)
        odd = count != expected
        exceptions = (order[odd], rows.num_computed[order[odd]], count[odd])
        rows.num_computed[order] += count
        rows.num_last_new[order] = count
        self._waiting.charge_rows(rows.account, order, count)
        admitted = tuple(
            self._describe(request, num_new)
            for request, num_new in zip(draft.admitted, draft.admitted_num_new, strict=True)
        )
        ran = order[count > 0]
        if admitted:
            ran = np.concatenate([ran, np.array([row.row for row in admitted], dtype=np.int32)])
        ran.sort()
        samples = rows.num_computed[ran] == rows.num_tokens[ran] + rows.num_pending[ran]
        rows.num_pending[ran[samples]] += 1
        step = FlyingStep(self._next_step_id, ran, rows.generation[ran], samples)
        step.published += draft.published
        self._journal.add(step)
        self._prefixes.publish_filled(ran, pool)
        plan = draft.seal(
            self._next_step_id,
            reset=self._reset,
            released_rows=[] if self._reset else self._released_rows,
            exceptions=exceptions,
            admitted_rows=admitted,
        )
        self._released_rows.clear()
        self._reset = False
        self._next_step_id += 1
        return plan

    def _describe(self, request: Request, num_new: int) -> AdmittedRow:
        return AdmittedRow(
            row=self._rows.row_of(request),
            request_id=request.request_id,
            tokens=np.frombuffer(request.tokens, dtype=np.int32),
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=request.admitted_tokens,
            num_new_tokens=num_new,
            block_tables=(np.array(request.blocks, dtype=np.int32),),
            sampling=request.sampling,
        )

    # Results.

    def _take_step(self, result: StepResult, failed: set[int]) -> FlyingStep:
        expected = self._journal.oldest_step_id
        if result.step_id != expected:
            raise ValueError(f"result of step {result.step_id}, expected {expected}")
        step = next(iter(self._journal))
        wanted = int(step.samples.sum())
        if failed:
            wanted -= int(step.samples[np.isin(step.rows, list(failed))].sum())
        if len(result.tokens) != wanted:
            raise ValueError(
                f"step {result.step_id} gave {len(result.tokens)} tokens, expected {wanted}"
            )
        if strangers := failed - set(step.rows.tolist()):
            raise ValueError(f"step {result.step_id} failed rows {sorted(strangers)}, not in it")
        if result.rows is not None:
            sampling = step.rows[step.samples & ~np.isin(step.rows, list(failed))]
            if not np.array_equal(result.rows, sampling):
                raise ValueError(f"step {result.step_id} gave tokens of rows that do not sample")
        return self._journal.pop()

    def _append(
        self,
        order: Int32Array,
        sampled: Int32Array,
        step_id: int,
        pool: BlockPool,
        now_ns: int,
        outcome: StepOutcome,
    ) -> None:
        """Append one token to each row; end those that stopped or reached their limit."""
        rows = self._rows
        length = rows.num_tokens[order]
        rows.tokens[order, length] = sampled
        rows.num_tokens[order] = length + 1
        rows.num_pending[order] -= 1
        self.counters.generation_tokens += len(order)
        outcome.requests.extend(rows.owners_of(order.tolist()))
        outcome.tokens.extend(sampled.tolist())
        for row in order[length == rows.num_prompt[order]].tolist():
            rows.owner(row).first_token_ns = now_ns
        stopped = rows.stops(order, sampled)
        ended = stopped | (rows.num_tokens[order] >= rows.limit[order])
        self._prefixes.publish_filled(order, pool)
        if ended.any():
            for place in np.flatnonzero(ended).tolist():
                request = rows.owner(int(order[place]))
                reason = FinishReason.STOP if stopped[place] else FinishReason.LENGTH
                request.last_step_id = step_id
                self._note_stop_id(request, int(sampled[place]), reason)
                self._end(request, reason, now_ns)
                outcome.finished.append(request)

    def _append_to_waiting(
        self, request: Request, token: int, step_id: int, now_ns: int, outcome: StepOutcome
    ) -> None:
        """Give a preempted request the token that was in flight when it lost its row."""
        if request.finish_reason is not None:
            return
        request.num_pending_tokens -= 1
        request.tokens.append(token)
        self._waiting.num_tokens += 1
        self.counters.generation_tokens += 1
        request.first_token_ns = request.first_token_ns or now_ns
        outcome.requests.append(request)
        outcome.tokens.append(token)
        stopping = request.stopping
        stopped = token in stopping.eos_token_ids | stopping.stop_token_ids
        stopped = stopped and request.num_output_tokens >= stopping.min_output_tokens
        if stopped or request.num_tokens >= request.limit:
            reason = FinishReason.STOP if stopped else FinishReason.LENGTH
            request.last_step_id = step_id
            self._note_stop_id(request, token, reason)
            self._end(request, reason, now_ns)
            outcome.finished.append(request)

    def _fail_row(
        self,
        step: FlyingStep,
        row: int,
        reason: str,
        pool: BlockPool,
        now_ns: int,
        outcome: StepOutcome,
    ) -> None:
        """End the request of a row that could not be computed; nobody may hit its blocks."""
        tainted = {block for publisher, block in step.published if publisher == row}
        request = step.orphans.get(row)
        if step.ran_for(row, int(self._rows.generation[row])):
            request = self._rows.owner(row)
            tainted.update(request.blocks[request.admitted_tokens // self.limits.block_size :])
        if request is not None and request.finish_reason is None:
            request.error = reason
            request.last_step_id = step.step_id
            self._end(request, FinishReason.ERROR, now_ns)
            outcome.finished.append(request)
        for block in tainted:
            pool.retract(block)
        for other in reversed(list(self._rows.running)):
            if not tainted.isdisjoint(other.blocks):
                # What it sampled from these blocks, here and in later steps, is in doubt too.
                self._preempt(other, now_ns, keep_in_flight=False)

    def _note_stop_id(self, request: Request, token: int, reason: FinishReason) -> None:
        if reason is FinishReason.STOP and token not in request.stopping.eos_token_ids:
            request.stop_token_id = token

    # Leaving a row.

    def _preempt(self, request: Request, now_ns: int, *, keep_in_flight: bool = True) -> None:
        """Take a running request's blocks; it waits, with its outputs, where its precedence is."""
        row = self._rows.row_of(request)
        if keep_in_flight:
            generation = int(self._rows.generation[row])
            request.num_pending_tokens = self._journal.adopt(request, row, generation)
        request.computed_before_preemption = int(self._rows.num_computed[row])
        request.preemption_times_ns.append(now_ns)
        self._leave_row(request)
        self.counters.preemptions += 1
        self._waiting.add(request)

    def _end(self, request: Request, reason: FinishReason, now_ns: int) -> None:
        """Finish a live request, wherever it is."""
        if request.row is not None:
            self._leave_row(request)
        else:
            self._waiting.remove(request)
        self._waiting.forget(request)
        del self._live[request.key]
        if request.first_step_id is not None and request.last_step_id is None:
            request.last_step_id = max(0, self._next_step_id - 1)
        request.finish_reason = reason
        request.finished_ns = now_ns

    def _leave_row(self, request: Request) -> None:
        """Give row and blocks back, the last block first, so that prefixes die last."""
        if self._pool is None:
            raise InvariantError("a request runs without a pool")
        self._released_rows.append(self._rows.give_back(request))
        self._pool.release(request.blocks[::-1])
        request.blocks = []
