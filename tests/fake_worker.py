"""A worker without a model, whose cache remembers the history behind each slot.

Real keys and values depend on every earlier token; so does a history. A stolen, stale or
wrongly shared block therefore shows as a wrong history, in the step that reads it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import chain

import numpy as np

from fake_told import candidates_of, pooled, prompt_part, told_of
from scheduler_svc.core.beam_options import BeamOptions
from scheduler_svc.core.beam_search import BeamSearch
from scheduler_svc.core.kv_groups import FULL_ATTENTION, KvGroup
from scheduler_svc.core.reports import Pooling
from scheduler_svc.core.request import Hypothesis, Stopping
from scheduler_svc.core.step_plan import (
    Candidates,
    Float32Array,
    Int32Array,
    StepPlan,
    StepResult,
)
from scheduler_svc.core.told import PromptPart

ROOT = 17

IN_DOUBT = -1
"""What a row that failed leaves in its slots. No history is -1."""


def extend(history: int, token: int) -> int:
    """Return the history that ends with one token more."""
    return hash((history, token))


def next_token(history: int, index: int = 0, vocabulary: int = 3) -> int:
    """Sample deterministically from everything before, as a real model would.

    What is drawn also depends on the sequence's index.
    """
    return ((hash((history, index)) if index else history) >> 7) % vocabulary


def likeliest(history: int, count: int, vocabulary: int = 9) -> tuple[Int32Array, Float32Array]:
    """Return the likeliest ids behind a history, with their log-probabilities."""
    noise = [hash((history, token)) % 1000 / 200 for token in range(vocabulary)]
    logits = np.array(noise, dtype=np.float32)
    logprobs = logits - np.log(np.exp(logits).sum())
    ids = np.argsort(-logprobs, kind="stable")[:count].astype(np.int32)
    return ids, logprobs[ids]


def search_alone(
    prompt: Sequence[int],
    options: BeamOptions,
    stopping: Stopping,
    max_output: int,
    root: int = ROOT,
) -> list[Hypothesis]:
    """Search without a scheduler: the oracle of beams."""
    search = BeamSearch(options, stopping, max_output)
    histories = [reduce(extend, prompt, root)]
    while not search.done:
        going = search.advance([likeliest(each, search.num_candidates) for each in histories])
        histories = [extend(histories[parent], token) for parent, token in going]
    return search.best()


def first_seen(group: KvGroup, position: int) -> int:
    """Return the first position that a token sees: found out without the scheduler's help."""
    if group.window:
        return max(0, position - group.window + 1)
    return position - position % group.chunk if group.chunk else 0


def generate_alone(
    prompt: Sequence[int], count: int, stop: frozenset[int], index: int = 0
) -> list[int]:
    """Generate without a scheduler: the oracle."""
    history = ROOT
    for token in prompt:
        history = extend(history, token)
    output: list[int] = []
    while len(output) < count and not (output and output[-1] in stop):
        output.append(next_token(history, index))
        history = extend(history, output[-1])
    return output


@dataclass(slots=True)
class FakeRow:
    """One row as a worker keeps it."""

    tokens: list[int]
    tables: list[list[int]]
    """One for each KV group. What a row gave back stays here, and must not be read."""
    num_computed: int
    num_new: int
    index: int = 0
    num_samples: int = 1
    num_candidates: int = 0
    logprobs: bool = False
    num_told: int | None = None
    """Candidates told at each position of the prompt. None: nothing is told."""
    num_prompt: int = 0
    pooling: Pooling | None = None
    first_computed: int = 0
    """Tokens it had in the cache when it was admitted."""
    histories: list[int] = field(default_factory=list)
    failed: bool = False
    root: int = ROOT
    drafted: list[int] = field(default_factory=list)
    """Tokens to verify in this step. They are the last of `tokens` meanwhile."""
    has_drafted: bool = False
    """It had a draft in the step before."""

    def history(self, position: int) -> int:
        """Return the history that ends at a position."""
        while len(self.histories) <= position:
            before = self.histories[-1] if self.histories else self.root
            self.histories.append(extend(before, self.tokens[len(self.histories)]))
        return self.histories[position]

    def verify(self, *, in_doubt: bool = False) -> list[int]:
        """Draw behind the last known token and behind each drafted one, as long as they agree."""
        draft, self.drafted, self.has_drafted = self.drafted, [], True
        first = len(self.tokens) - len(draft)
        drawn: list[int] = []
        for number in range(len(draft) + 1):
            history = self.history(first - 1 + number)
            drawn.append((next_token(history, self.index) + in_doubt) % 3)
            if draft[number : number + 1] != drawn[-1:]:
                break
        self.tokens[first:] = drawn
        del self.histories[len(self.tokens) - 1 :]
        self.num_new = len(drawn)
        return drawn

    def sample(self, *, in_doubt: bool = False) -> list[int]:
        """Draw the tokens behind the last, for each index asked for, and keep the first.

        What was read is in doubt: these are the wrong ones.
        """
        if self.drafted:
            return self.verify(in_doubt=in_doubt)
        history = self.history(len(self.tokens) - 1)
        if self.num_candidates and not self.logprobs:
            self.tokens.append(int(self.candidates(in_doubt=in_doubt)[0][0]))
            return self.tokens[-1:]
        drawn = [next_token(history, self.index + i) for i in range(self.num_samples)]
        drawn = [(token + in_doubt) % 3 for token in drawn]
        self.tokens.append(drawn[0])
        self.num_samples = 1
        return drawn

    def candidates(self, *, in_doubt: bool = False) -> tuple[Int32Array, Float32Array]:
        """Return the likeliest ids behind the last token, if they were asked for."""
        history = self.history(len(self.tokens) - 1)
        if self.logprobs:
            ids, logprobs = candidates_of(history + in_doubt, self.num_candidates)
            return np.array(ids, dtype=np.int32), np.array(logprobs, dtype=np.float32)
        return likeliest(history + in_doubt, self.num_candidates)

    def told(self, drawn: list[int], *, in_doubt: bool = False) -> list[tuple[float, int]]:
        """Return what is told of tokens just drawn; zeros, if nothing was asked."""
        history = self.history(len(self.tokens) - 2)
        return [
            told_of(history + in_doubt, token) if self.logprobs else (0.0, 0) for token in drawn
        ]

    def prompt_part(self, number: int) -> PromptPart | None:
        """Return what this step tells of the prompt, if anything."""
        last = min(self.num_computed + self.num_new, self.num_prompt - 1)
        if self.num_told is None or last <= self.num_computed:
            return None
        begin = self.num_computed
        histories = [self.history(position) for position in range(begin, last)]
        return prompt_part(
            number, begin + 1, histories, self.tokens[begin + 1 : last + 1], self.num_told
        )

    def vector(self) -> Float32Array:
        """Return the pooled state, all tokens being computed."""
        assert self.pooling is not None
        assert self.pooling is Pooling.LAST or not self.first_computed
        histories = [self.history(position) for position in range(len(self.tokens))]
        return np.array(pooled(histories, self.pooling), dtype=np.float32)

    def fork(self, index: int, last_token: int | None, num_blocks: int) -> "FakeRow":
        """Return a row that goes on from here, with the first blocks and another last token."""
        assert all(num_blocks <= len(table) for table in self.tables)
        tokens = list(self.tokens)
        if last_token is not None:
            tokens[-1] = last_token
        return replace(
            self,
            tokens=tokens,
            tables=[table[:num_blocks] for table in self.tables],
            index=index,
            num_samples=1,
            histories=self.histories[: len(tokens) - 1],
        )


def _columns(candidates: list[tuple[Int32Array, Float32Array]]) -> Candidates | None:
    counts = np.array([len(ids) for ids, _ in candidates], dtype=np.int32)
    if not counts.any():
        return None
    ids, logprobs = zip(*candidates, strict=True)
    return Candidates(np.concatenate(ids), np.concatenate(logprobs), counts)


def _told_columns(
    told: list[tuple[float, int]],
) -> tuple[Float32Array | None, Int32Array | None]:
    if not any(rank for _, rank in told):
        return None, None
    logprobs, ranks = zip(*told, strict=True)
    return np.array(logprobs, dtype=np.float32), np.array(ranks, dtype=np.int32)


class FakeWorker:
    """Runs step plans, proving that each row reads exactly its own past, in every KV group."""

    def __init__(
        self, block_size: int, num_blocks: int, groups: Sequence[KvGroup] = FULL_ATTENTION
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.groups = groups
        self.rows: dict[int, FakeRow] = {}
        self.cache: dict[int, int] = {}
        self.next_step_id = 0
        self.num_copies = 0
        self.roots: dict[str, int] = {}
        """History that requests start with, by their ids: what an adapter or a salt changes."""
        self._has_doubt = False

    def run(self, plan: StepPlan, failing: frozenset[int] = frozenset()) -> StepResult:
        """Run one step: all rows store, then all rows read, as kernels do.

        What a `failing` row stores is in doubt, and so is what others compute from it.
        """
        self._follow(plan)
        running = [(number, row) for number, row in sorted(self.rows.items()) if row.num_new]
        assert running
        assert sum(row.num_new for _, row in running) == plan.num_tokens
        assert len(running) == plan.num_rows
        self._copy(plan)
        for number, row in running:
            row.failed |= number in failing
            self._store(row, in_doubt=row.failed)
        self._spread_doubt([row for _, row in running])
        sampled: list[list[int]] = []
        candidates: list[tuple[Int32Array, Float32Array]] = []
        sampling, errors = [], []
        told: list[tuple[float, int]] = []
        parts: list[PromptPart] = []
        vectors: list[tuple[int, Float32Array]] = []
        for number, row in running:
            if row.failed:
                # It has stopped for good, and waits to be released.
                errors.append((number, "planted"))
                continue
            in_doubt = self._reads_doubt(row)
            if not in_doubt:
                for slot, position in self._reads(row):
                    assert self.cache.get(slot) == row.history(position)
            end = row.num_computed + row.num_new
            assert end <= len(row.tokens)
            if (part := row.prompt_part(number)) is not None:
                parts.append(part)
            if end == len(row.tokens) and row.pooling is not None:
                vectors.append((number, row.vector() + in_doubt))
            elif end == len(row.tokens):
                sampling.append(number)
                candidates.append(row.candidates(in_doubt=in_doubt))
                sampled.append(row.sample(in_doubt=in_doubt))
                told += row.told(sampled[-1], in_doubt=in_doubt)
        return StepResult(
            plan.step_id,
            np.array([*chain(*sampled)], dtype=np.int32),
            tuple(errors),
            np.array(sampling, dtype=np.int32),
            np.array([len(tokens) for tokens in sampled], dtype=np.int32),
            _columns(candidates),
            *_told_columns(told),
            tuple(parts),
            tuple(vectors),
        )

    def _store(self, row: FakeRow, *, in_doubt: bool) -> None:
        for position in range(row.num_computed, row.num_computed + row.num_new):
            for slot in self._slots(row, position):
                assert self.block_size <= slot < (self.num_blocks + 1) * self.block_size
                self.cache[slot] = IN_DOUBT if in_doubt else row.history(position)
        self._has_doubt |= in_doubt

    def _spread_doubt(self, rows: Sequence[FakeRow]) -> None:
        """Whoever reads what is in doubt stores what is in doubt, in this very step."""
        clear = [row for row in rows if self._has_doubt and not row.failed]
        while reading := [row for row in clear if self._reads_doubt(row)]:
            for row in reading:
                self._store(row, in_doubt=True)
            clear = [row for row in clear if row not in reading]

    def _reads(self, row: FakeRow) -> Iterator[tuple[int, int]]:
        """Yield the slots that a row reads in this step, and the position each is for."""
        for each, group in enumerate(self.groups):
            for position in range(
                first_seen(group, row.num_computed), row.num_computed + row.num_new
            ):
                yield self._slots(row, position)[each], position

    def _reads_doubt(self, row: FakeRow) -> bool:
        return self._has_doubt and any(
            self.cache.get(slot) == IN_DOUBT for slot, _ in self._reads(row)
        )

    def _follow(self, plan: StepPlan) -> None:
        if plan.reset:
            assert not len(plan.released_rows)
            self.rows.clear()
            self.next_step_id = 0
        assert plan.step_id == self.next_step_id
        self.next_step_id += 1
        for row in plan.released_rows.tolist():
            del self.rows[row]
        if plan.forked:
            assert len({fork.row for fork in plan.forked}) == len(plan.forked)
            self.rows |= {
                fork.row: self.rows[fork.parent_row].fork(
                    fork.sequence_index, fork.last_token, fork.num_blocks
                )
                for fork in plan.forked
            }
        for row in self.rows.values():
            row.num_computed += row.num_new
            row.num_new = 1 if row.num_new else 0
        for new in plan.admitted:
            assert new.row not in self.rows
            tables = [table.tolist() for table in new.block_tables]
            assert len(tables) == len(self.groups)
            assert len({len(table) for table in tables}) == 1
            self.rows[new.row] = FakeRow(
                new.tokens.tolist(),
                tables,
                new.num_computed_tokens,
                new.num_new_tokens,
                new.sequence_index,
                new.num_samples,
                new.num_candidates,
                new.logprobs,
                new.prompt_logprobs,
                new.num_prompt_tokens,
                new.pooling,
                new.num_computed_tokens,
                root=self.roots.get(new.request_id, ROOT),
            )
        for gained in plan.appended:
            for number, block in zip(gained.rows.tolist(), gained.blocks.tolist(), strict=True):
                self.rows[number].tables[gained.group].append(block)
        for number, computed, count in zip(
            plan.exception_rows.tolist(),
            plan.exception_num_computed_tokens.tolist(),
            plan.exception_num_new_tokens.tolist(),
            strict=True,
        ):
            row = self.rows[number]
            # Of a draft that is not answered the scheduler does not know how much was computed.
            assert row.num_computed == computed or (row.has_drafted and not count)
            row.num_new = count
            row.has_drafted &= not count
        for draft in plan.drafts:
            assert draft.row in plan.serial_rows
            row = self.rows[draft.row]
            row.drafted = draft.tokens.tolist()
            assert row.num_computed + row.num_new == len(row.tokens) + len(row.drafted)
            row.tokens += row.drafted

    def _copy(self, plan: StepPlan) -> None:
        """Copy blocks, before anything is stored."""
        sources, destinations = plan.copy_sources.tolist(), plan.copy_destinations.tolist()
        assert len(set(destinations)) == len(destinations)
        assert not {*sources} & {*destinations}
        self.num_copies += len(sources)
        size = self.block_size
        for source, destination in zip(sources, destinations, strict=True):
            for offset in range(size):
                self.cache.pop(destination * size + offset, None)
                if source * size + offset in self.cache:
                    self.cache[destination * size + offset] = self.cache[source * size + offset]

    def _slots(self, row: FakeRow, position: int) -> list[int]:
        """Return where a position's keys and values lie, in each group; anywhere if unseen."""
        column, offset = divmod(position, self.block_size)
        return [table[column] * self.block_size + offset for table in row.tables]
