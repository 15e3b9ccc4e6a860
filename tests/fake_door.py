"""An engine that answers each request from a script, for tests of the front end."""

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np

from scheduler_svc.core.block_hash import ExtraKeys
from scheduler_svc.core.errors import (
    DuplicateRequestError,
    QueueFullError,
    RequestError,
    UnavailableError,
    UnknownAdapterError,
    UnknownPinError,
)
from scheduler_svc.core.miss_reason import MissReason
from scheduler_svc.core.request import FinishReason
from scheduler_svc.service.adapter_door import AdapterState
from scheduler_svc.service.engine_door import (
    Accepted,
    Account,
    Finish,
    Gain,
    Submission,
    TokenBatch,
)
from scheduler_svc.service.server_state import (
    GroupState,
    Load,
    ServerState,
    Totals,
    WorkerState,
)
from scheduler_svc.service.step_record import StepTimes

MAX_OUTPUT = 1000
"""Tokens of a hypothesis, if nothing ends it before."""

Script = Callable[[Submission], Iterable[int]]


def successors(submission: Submission) -> Iterable[int]:
    """Answer with the ids that follow the prompt's last one, within lower-case letters."""
    token = submission.token_ids[-1]
    while True:
        token = ord("a") + (token + 1 - ord("a")) % 26
        yield token


class FakeSequence:
    """One sequence's scripted tokens, and how it ends."""

    def __init__(self, script: Iterable[int], submission: Submission, limit: int) -> None:
        self._token_ids = iter(script)
        self._submission = submission
        self._limit = limit
        self.num_output_tokens = 0
        self.finish: Finish | None = None
        self.told = False

    def next_tokens(self, count: int) -> tuple[int, ...]:
        """Return the next tokens, fewer if the sequence ends, or has ended, before."""
        submission, tokens = self._submission, list[int]()
        while self.finish is None and len(tokens) < count:
            token = next(self._token_ids, None)
            if token is None:
                self.finish = Finish(FinishReason.ERROR, None, "the script is over")
                break
            tokens.append(token)
            self.num_output_tokens += 1
            if token in submission.eos_token_ids:
                self.finish = Finish(FinishReason.STOP, None, "")
            elif token in submission.stop_token_ids:
                self.finish = Finish(FinishReason.STOP, token, "")
            elif self.num_output_tokens == self._limit:
                self.finish = Finish(FinishReason.LENGTH, None, "")
        return tuple(tokens)


class FakeStream:
    """One request's scripted tokens, `batch_size` of each sequence to a batch."""

    def __init__(self, door: "FakeDoor", submission: Submission) -> None:
        self._door = door
        self._submission = submission
        self._account: Account | None = None
        self._first_ns: int | None = None
        self.aborted = asyncio.Event()
        limit = submission.max_output_tokens or door.max_model_len - len(submission.token_ids)
        scripts = (door.script, *door.more_scripts)
        self._sequences = [
            FakeSequence(scripts[index % len(scripts)](submission), submission, limit)
            for index in range(submission.num_outputs)
        ]
        self.accepted = Accepted(
            submission.request_id, len(submission.token_ids), limit, submission.sampling.seed
        )

    def __aiter__(self) -> AsyncIterator[TokenBatch]:
        return self._batches()

    async def _batches(self) -> AsyncIterator[TokenBatch]:
        step_id = -1
        while self._account is None:
            step_id += 1
            if all(sequence.finish is None or sequence.told for sequence in self._sequences):
                await self._door.between_batches(self)
                if self._door.error is not None:
                    raise self._door.error
            gains = tuple(self._gains(step_id))
            if all(sequence.told for sequence in self._sequences):
                self._account = self.account(finished=True)
            # The reader may call `finish` while it has the batch.
            yield TokenBatch(gains, self._account)

    def _gains(self, step_id: int) -> Iterator[Gain]:
        beams = self._submission.beam is not None
        for index, sequence in enumerate(self._sequences):
            if sequence.told:
                continue
            if self.aborted.is_set():
                sequence.finish = sequence.finish or Finish(FinishReason.ABORT, None, "")
            if self._submission.reports.pooling is not None:
                sequence.finish = sequence.finish or self._door.pool(self._submission)
            tokens = sequence.next_tokens(MAX_OUTPUT if beams else self._door.batch_size)
            if tokens:
                self._first_ns = self._first_ns or time.monotonic_ns()
            finish = sequence.finish
            if beams and finish is not None:
                finish = replace(finish, cumulative_logprob=-2.0 - index, score=-0.5 - index)
            sequence.told = finish is not None
            yield Gain(index, tokens, step_id, finish)

    def finish(self, sequence_index: int, num_output_tokens: int) -> None:
        """End a sequence after so many tokens."""
        self._door.cuts.append(num_output_tokens)
        sequence = self._sequences[sequence_index]
        if not sequence.told:
            sequence.num_output_tokens = num_output_tokens
            sequence.finish = Finish(FinishReason.STOP, None, "")

    async def rest(self, seconds: float) -> None:
        """Let nothing pile up: the script knows its batches."""
        await asyncio.sleep(seconds)

    def account(self, *, finished: bool = False) -> Account:
        """Say what the request cost."""
        if self._account is not None:
            return self._account
        submission = self._submission
        started = self._first_ns is not None
        num_output_tokens = sum(sequence.num_output_tokens for sequence in self._sequences)
        return Account(
            num_prompt_tokens=len(submission.token_ids),
            num_output_tokens=num_output_tokens,
            num_cached_tokens=self._door.num_cached_tokens,
            num_recomputed_tokens=0,
            num_preemptions=len(self._door.preemption_times_ns),
            arrival_ns=submission.arrival_ns,
            first_scheduled_ns=submission.arrival_ns + 1000 if started else None,
            first_token_ns=self._first_ns,
            finished_ns=time.monotonic_ns() if finished else None,
            first_step_id=0 if started else None,
            last_step_id=num_output_tokens if started else None,
            preemption_times_ns=tuple(self._door.preemption_times_ns),
            miss_reason=MissReason.TAIL if started else None,
        )


class FakeAdapters:
    """Adapters that are loaded at once. Their generations count up."""

    def __init__(self) -> None:
        self.paths: dict[str, str] = {}
        self.refuse: RequestError | None = None

    async def load(self, name: str, path: str) -> int:
        """Load one."""
        if self.refuse is not None:
            raise self.refuse
        self.paths[name] = path
        return len(self.paths)

    async def unload(self, name: str) -> None:
        """Unload one."""
        if self.paths.pop(name, None) is None:
            raise UnknownAdapterError(f"adapter {name!r} is not loaded")

    def loaded(self) -> list[AdapterState]:
        """List all."""
        return [AdapterState(name, 7) for name in sorted(self.paths)]


def last_ids(submission: Submission) -> Finish:
    """Pool a prompt into its length and its last id."""
    vector = np.array([len(submission.token_ids), submission.token_ids[-1]], dtype=np.float32)
    return Finish(FinishReason.STOP, None, "", vector=vector)


class FakeDoor:
    """An `EngineDoor`. Tests set its attributes, and read what it saw."""

    def __init__(self, max_model_len: int) -> None:
        self.max_model_len = max_model_len
        self.script: Script = successors
        self.more_scripts: tuple[Script, ...] = ()
        """Of the sequences behind the first; all in turn, if a request has more."""
        self.pool: Callable[[Submission], Finish] = last_ids
        """How a request for a vector ends."""
        self.batch_size = 1
        self.step_s = 0.0
        self.error: RequestError | None = None
        self.refuse: RequestError | None = None
        self.most_waiting: int | None = None
        """Requests beyond which the queue is full. None: it never is."""
        self.num_cached_tokens = 0
        self.preemption_times_ns: list[int] = []
        self.submissions: list[Submission] = []
        self.cuts: list[int] = []
        self.num_left = 0
        self.most_live = 0
        self.live: dict[tuple[str, str], FakeStream] = {}
        self.num_steps = 0
        self.pins: dict[str, tuple[list[int], ExtraKeys, float]] = {}
        self.draining = False
        self.recent: StepTimes | None = None
        self.adapters = FakeAdapters()
        self._empty = asyncio.Event()

    async def between_batches(self, stream: FakeStream) -> None:
        """Let a step's time pass, or less if the stream is aborted."""
        self.num_steps += 1
        if not self.step_s:
            await asyncio.sleep(0)
            return
        try:
            async with asyncio.timeout(self.step_s):
                await stream.aborted.wait()
        except TimeoutError:
            pass

    @asynccontextmanager
    async def open(self, submission: Submission) -> AsyncIterator[FakeStream]:
        """Take a request."""
        self.submissions.append(submission)
        if self.draining:
            raise UnavailableError("the server drains")
        if self.refuse is not None:
            raise self.refuse
        if self.most_waiting is not None and len(self.live) >= self.most_waiting:
            raise QueueFullError(f"{len(self.live)} requests wait, at most {self.most_waiting} may")
        key = submission.tenant, submission.request_id
        if key in self.live:
            raise DuplicateRequestError(f"{submission.request_id!r} is live")
        stream = FakeStream(self, submission)
        self.live[key] = stream
        self.most_live = max(self.most_live, len(self.live))
        self._empty.clear()
        try:
            yield stream
        finally:
            del self.live[key]
            self.num_left += 1
            if not self.live:
                self._empty.set()

    def abort(self, tenant: str, request_ids: Sequence[str] | None) -> tuple[list[str], list[str]]:
        """End requests."""
        live = {id_: stream for (of, id_), stream in self.live.items() if of == tenant}
        wanted = list(live) if request_ids is None else list(request_ids)
        aborted = [id_ for id_ in wanted if id_ in live]
        for id_ in aborted:
            live[id_].aborted.set()
        return aborted, [id_ for id_ in wanted if id_ not in live]

    def abort_everyone(self) -> list[str]:
        """End all requests."""
        for stream in self.live.values():
            stream.aborted.set()
        return [request_id for _, request_id in self.live]

    def load(self) -> Load:
        """Say how many are live; the pool is made up."""
        totals = Totals(self.num_steps, 11, 22, 33, 12, 4, 5)
        return Load(len(self.live), 1, 3, 2, 5, 10, 7, totals, self.recent)

    def server_state(self) -> ServerState:
        """Describe a group with one worker."""
        worker = WorkerState(0, 77, "cpu", "float32", "idle")
        return ServerState(42, self.draining, (GroupState(0, True, 3, 10, (worker,), "f1"),))

    def pin(self, tokens: "array[int]", extra: ExtraKeys, time_to_live_s: float) -> tuple[str, int]:
        """Pin every whole block of four tokens."""
        if self.refuse is not None:
            raise self.refuse
        self.pins["p1"] = (tokens.tolist(), extra, time_to_live_s)
        return "p1", len(tokens) // 4

    def unpin(self, pin_id: str) -> None:
        """Let go of a pin."""
        if self.pins.pop(pin_id, None) is None:
            raise UnknownPinError("no such pin")

    def flush_cache(self) -> int:
        """Forget two blocks."""
        return 2

    async def drain(self) -> None:
        """Refuse new requests and wait for the live ones."""
        self.draining = True
        if self.live:
            await self._empty.wait()

    def resume(self) -> None:
        """Take requests again."""
        self.draining = False
