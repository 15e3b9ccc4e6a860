"""Plays a scheduler that forks at random, and knows what each row must answer: what it would alone.

Blocks are shared and copied as a scheduler may: full ones by any number of rows, the partly filled
last one by a copy, or by taking it from a parent that ends in the same plan.
"""

import random
from collections import Counter, abc
from dataclasses import dataclass, field, replace

from plan_driver import AnyRunner, int32, make_plan
from worker_svc.runtime.step_plan import AdmittedRow, ForkedRow, SamplingParams, StepResult

LONGEST = 24
"""A row of so many tokens is released."""


@dataclass
class Known:
    """What the script knows of a row."""

    tokens: list[int]
    sampling: SamplingParams
    sequence_index: int
    num_candidates: int
    num_samples: int
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_new: int = 0

    def admission(self, row: int) -> AdmittedRow:
        return AdmittedRow(
            row=row,
            request_id=f"row-{row}",
            tokens=int32(*self.tokens),
            num_prompt_tokens=1,
            num_computed_tokens=self.num_computed,
            num_new_tokens=self.num_new,
            block_tables=(int32(*self.blocks),),
            sampling=self.sampling,
            sequence_index=self.sequence_index,
            num_samples=self.num_samples,
            num_candidates=self.num_candidates,
        )


Answer = tuple[int, tuple[int, ...], tuple[float, ...]]
"""A sampled token, and candidates with their log-probabilities."""


class Alone:
    """Computes what a row answers from all its tokens, with nothing in the cache."""

    def __init__(self, runner: AnyRunner) -> None:
        self._runner = runner
        self._answers: dict[object, Answer] = {}

    def answer(self, known: Known, nth: int) -> Answer:
        index = known.sequence_index + nth
        key = (tuple(known.tokens), known.sampling, index, known.num_candidates)
        if key not in self._answers:
            width = -(-len(known.tokens) // self._runner.kv_cache.block_size)
            alone = replace(
                known,
                sequence_index=index,
                num_samples=1,
                blocks=list(range(1, width + 1)),
                num_computed=0,
                num_new=len(known.tokens),
            )
            plan = make_plan(0, reset=True, admitted=[alone.admission(0)])
            result = self._runner.run(plan)
            candidates = result.candidates
            self._answers[key] = (
                int(result.tokens[0]),
                () if candidates is None else tuple(candidates.ids.tolist()),
                () if candidates is None else tuple(candidates.logprobs.tolist()),
            )
        return self._answers[key]


class ForkScript:
    """Makes one plan after the other, and checks each answer."""

    def __init__(self, runner: AnyRunner, alone: Alone, vocab: int, rng: random.Random) -> None:
        self._runner = runner
        self._alone = alone
        self._vocab = vocab
        self._rng = rng
        self._block_size = runner.kv_cache.block_size
        self._num_rows = len(runner.rows.num_tokens)
        self._users: Counter[int] = Counter()
        self._free = list(range(1, runner.kv_cache.num_blocks + 1))
        rng.shuffle(self._free)
        self._rows: dict[int, Known] = {}
        self._step_id = 0
        self._appended: list[tuple[int, int]] = []
        self._copies: list[tuple[int, int]] = []
        self._exceptions: list[tuple[int, int, int]] = []
        self.seen: Counter[str] = Counter()
        """How often each kind of fork was made."""

    def step(self) -> None:
        """Run one plan and check what comes back."""
        self._appended, self._copies, self._exceptions = [], [], []
        held = {row: list(known.blocks) for row, known in self._rows.items()}
        released = self._release()
        forked = self._fork()
        admitted = self._admit()
        for row, known in self._rows.items():
            if row not in admitted:
                self._advance(row, known)
        plan = make_plan(
            self._step_id,
            released=released,
            forked=forked,
            admitted=[self._rows[row].admission(row) for row in admitted],
            appended=self._appended,
            copies=self._copies,
            exceptions=self._exceptions,
        )
        self._step_id += 1
        # Only now: a block that is copied from must not be handed out in the same plan.
        self._recount(held)
        self._check(self._runner.run(plan))

    def _release(self) -> list[int]:
        released = [
            row
            for row, known in self._rows.items()
            if len(known.tokens) >= LONGEST or self._rng.random() < 0.1
        ]
        for row in released:
            del self._rows[row]
        return released

    def _fork(self) -> list[ForkedRow]:
        before = {row: replace(known) for row, known in self._rows.items()}
        if not before:
            return []
        children = self._rng.sample(range(self._num_rows), self._rng.choice([0, 0, 1, 2, 3, 5]))
        pairs = [
            (row, row if row in before and self._rng.random() < 0.4 else self._pick(before))
            for row in children
        ]
        # Parents that go on in no row of their own: one child may have their last block.
        ending = {row for row, parent in pairs if row in before and row != parent}
        forks: list[ForkedRow] = []
        for row, parent in pairs:
            taken = parent in ending
            ending.discard(parent)
            forks.append(self._fork_one(row, parent, before[parent], taken=taken))
        self.seen["chained"] += len({parent for _, parent in pairs} & set(children))
        return forks

    def _pick(self, rows: abc.Collection[int]) -> int:
        return self._rng.choice(sorted(rows))

    def _fork_one(self, row: int, parent_row: int, parent: Known, *, taken: bool) -> ForkedRow:
        computed = parent.num_computed + parent.num_new
        full, rest = divmod(computed, self._block_size)
        child = replace(parent, tokens=list(parent.tokens), blocks=list(parent.blocks))
        child.sequence_index = self._rng.randrange(100)
        last = self._rng.randrange(self._vocab) if self._rng.random() < 0.5 else None
        if last is not None:
            child.tokens[-1] = last
        kept = len(parent.blocks)
        if self._rng.random() < 0.2:
            # Fewer blocks than are computed: `_advance` says how far it is.
            kept = self._rng.randint(0, full)
            child.num_computed, child.num_new = kept * self._block_size, 0
            self._exceptions.append((row, child.num_computed, 0))
            child.blocks = parent.blocks[:kept]
            kind = "shortened"
        elif taken or (row == parent_row and self._rng.random() < 0.6):
            kind = "taken" if taken else "in place"
        else:
            kept = full
            child.blocks = parent.blocks[:full]
            kind = "shared"
            if rest:
                child.blocks.append(self._free.pop())
                self._appended.append((row, child.blocks[-1]))
                self._copies.append((parent.blocks[full], child.blocks[-1]))
                kind = "copied"
        self.seen[kind] += 1
        self._rows[row] = child
        return ForkedRow(row, parent_row, child.sequence_index, last, kept)

    def _admit(self) -> list[int]:
        rows = [row for row in range(self._num_rows) if row not in self._rows]
        admitted = [row for row in rows if self._rng.random() < 0.3]
        for row in admitted:
            temperature = self._rng.choice([0.0, 0.8, 2.0])
            known = Known(
                tokens=[self._rng.randrange(self._vocab) for _ in range(self._rng.randint(1, 11))],
                sampling=SamplingParams(temperature=temperature, top_k=40, seed=row),
                sequence_index=self._rng.randrange(100),
                num_candidates=self._rng.choice([0, 0, 3, 8]),
                num_samples=self._rng.choice([1, 1, 3]),
            )
            known.num_new = self._rng.randint(0, len(known.tokens))
            known.blocks = self._grant(known)
            self._rows[row] = known
        return admitted

    def _advance(self, row: int, known: Known) -> None:
        """Choose what the row runs, and say so where it is not what a row does by itself."""
        moved = [entry for entry in self._exceptions if entry[0] == row]
        computed = known.num_computed + known.num_new
        missing = len(known.tokens) - computed
        usual = min(known.num_new, 1)
        new = self._rng.choice([usual, usual, 0, self._rng.randint(1, missing)])
        if moved:
            self._exceptions.remove(moved[0])
        if moved or new != usual:
            self._exceptions.append((row, computed, new))
        known.num_computed, known.num_new = computed, new
        granted = self._grant(known)
        known.blocks += granted
        self._appended += [(row, block) for block in granted]

    def _grant(self, known: Known) -> list[int]:
        width = -(-(known.num_computed + known.num_new) // self._block_size)
        return [self._free.pop() for _ in range(width - len(known.blocks))]

    def _recount(self, held: dict[int, list[int]]) -> None:
        used = {block for blocks in held.values() for block in blocks}
        self._users = Counter(block for known in self._rows.values() for block in known.blocks)
        self._free[:0] = sorted(block for block in used if not self._users[block])

    def _check(self, result: StepResult) -> None:
        sampling = [
            (row, known)
            for row, known in sorted(self._rows.items())
            if known.num_new and known.num_computed + known.num_new == len(known.tokens)
        ]
        assert result.row_errors == ()
        assert result.rows.tolist() == [row for row, _ in sampling]
        counts = [known.num_samples for _, known in sampling]
        assert (result.num_tokens.tolist() or [1] * len(sampling)) == counts
        answers = [
            [self._alone.answer(known, nth) for nth in range(known.num_samples)]
            for _, known in sampling
        ]
        assert result.tokens.tolist() == [token for drawn in answers for token, _, _ in drawn]
        self._check_candidates(result, [drawn[0] for drawn in answers])
        for (_, known), drawn in zip(sampling, answers, strict=True):
            known.tokens.append(drawn[0][0])
            known.num_samples = 1

    def _check_candidates(self, result: StepResult, answers: list[Answer]) -> None:
        found = result.candidates
        if found is None:
            assert not any(ids for _, ids, _ in answers)
            return
        assert found.counts.tolist() == [len(ids) for _, ids, _ in answers]
        assert found.ids.tolist() == [token for _, ids, _ in answers for token in ids]
        logprobs = [logprob for _, _, column in answers for logprob in column]
        assert abs(found.logprobs - logprobs).max(initial=0) < 1e-4
