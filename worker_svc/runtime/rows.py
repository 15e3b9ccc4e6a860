"""The requests a worker runs, as columns: what it knows of each row between steps."""

import numpy as np
import numpy.typing as npt

from worker_svc.errors import InvariantError
from worker_svc.runtime.block_tables import BlockTables
from worker_svc.runtime.embedded_spans import EmbeddedSpans
from worker_svc.runtime.forks import fork_columns
from worker_svc.runtime.logit_rules import names_only
from worker_svc.runtime.sampling_columns import NO_PROMPT_LOGPROBS, SamplingColumns
from worker_svc.runtime.step_plan import (
    AdmittedRow,
    Draft,
    ForkedRow,
    Int32Array,
    Int64Array,
    StepPlan,
)


class Rows:
    """One entry per row in every column; `apply` brings them to the next step.

    A row runs in a step if its `num_new_tokens` is not 0. A row that failed stays planned until
    the scheduler hears of it, but is not run.

    Invariant: for each row that runs, num_computed_tokens + num_new_tokens is at most both
        num_tokens and the slots of its blocks. `running` proves it.
    """

    __slots__ = (
        "_known",
        "_vocab_size",
        "adapter",
        "block_tables",
        "embedded",
        "failures",
        "has_drafts",
        "num_computed_tokens",
        "num_drafted",
        "num_new_tokens",
        "num_tokens",
        "sampling",
        "tokens",
    )

    def __init__(
        self,
        max_rows: int,
        max_tokens: int,
        tables: tuple[BlockTables, ...],
        vocab: int,
        embedded: EmbeddedSpans | None = None,
    ) -> None:
        """Make empty rows, with `tables` of each KV group. All tables of a row are equally long.

        Without `embedded`, rows take no embeddings.
        """
        # The operating system zeroes a page when it is first touched: unused length costs nothing.
        self.tokens: Int32Array = np.zeros((max_rows, max_tokens), dtype=np.int32)
        self.num_tokens: Int32Array = np.zeros(max_rows, dtype=np.int32)
        self.num_computed_tokens: Int32Array = np.zeros(max_rows, dtype=np.int32)
        self.num_new_tokens: Int32Array = np.zeros(max_rows, dtype=np.int32)
        # Tokens behind the known ones that this step verifies.
        self.num_drafted: Int32Array = np.zeros(max_rows, dtype=np.int32)
        self.has_drafts = False
        self.sampling = SamplingColumns(max_rows)
        self.adapter: Int32Array = np.zeros(max_rows, dtype=np.int32)
        self.embedded = embedded or EmbeddedSpans(0)
        self.block_tables = tables
        self.failures: dict[int, str] = {}
        self._known: npt.NDArray[np.bool_] = np.zeros(max_rows, dtype=np.bool_)
        self._vocab_size = vocab

    def apply(self, plan: StepPlan) -> None:
        """Forget, learn and advance rows as the plan says.

        Raises: InvariantError if the plan names a row that is not there, or does not fit one.
        """
        if plan.reset:
            self._forget(np.flatnonzero(self._known))
        self._check_known(plan.released_rows, "released")
        self._forget(plan.released_rows)
        if plan.forked:
            self._fork(plan.forked)
        self._advance()
        for entry in plan.admitted:
            self._admit(entry)
        self._append(plan)
        self._check_known(plan.exception_rows, "excepted")
        self.num_computed_tokens[plan.exception_rows] = plan.exception_num_computed_tokens
        self.num_new_tokens[plan.exception_rows] = plan.exception_num_new_tokens
        if self.has_drafts:
            self.num_drafted.fill(0)
        self.has_drafts = bool(plan.drafts)
        for draft in plan.drafts:
            self._draft(draft)

    def running(self) -> Int64Array:
        """Return the rows to run in this step, ascending.

        Raises: InvariantError if one has not the tokens or the blocks it would need.
        """
        rows = np.flatnonzero(self.num_new_tokens)
        if self.failures:
            rows = rows[~np.isin(rows, list(self.failures))]
        computed, new = self.num_computed_tokens[rows], self.num_new_tokens[rows]
        ends = computed + new
        known = self.num_tokens[rows] + self.num_drafted[rows]
        wrong = (computed < 0) | (new < 0) | (ends > known)
        for tables in self.block_tables:
            wrong |= ends > tables.num_slots(rows)
        if wrong.any():
            row = int(rows[np.argmax(wrong)])
            raise InvariantError(
                f"row {row} is to run {self.num_new_tokens[row]} tokens behind "
                f"{self.num_computed_tokens[row]}, but has {self.num_tokens[row]} tokens and "
                f"{min(int(tables.num_blocks[row]) for tables in self.block_tables)} blocks"
            )
        return rows

    def read_all_tokens(self, running: Int64Array) -> bool:
        """Return whether some row pools, tells of its prompt, or has a draft verified.

        Otherwise nobody reads more hidden states than those of last tokens. Shape: running [R].
        """
        params = self.sampling
        if not (params.asking or self.has_drafts):
            return False
        return bool(
            (
                (params.pooling[running] > 0)
                | (params.prompt_logprobs[running] != NO_PROMPT_LOGPROBS)
                | (self.num_drafted[running] > 0)
            ).any()
        )

    def failed(self) -> tuple[tuple[int, str], ...]:
        """Return the rows that were to run in this step but have failed, with their reasons."""
        return tuple(
            (row, message)
            for row, message in sorted(self.failures.items())
            if self.num_new_tokens[row]
        )

    def append_tokens(self, rows: Int64Array, tokens: Int32Array) -> None:
        """Add one sampled token to each row. Shapes: rows, tokens [S].

        Raises: InvariantError if a row is full.
        """
        positions = self.num_tokens[rows]
        if len(rows) and positions.max() >= self.tokens.shape[1]:
            raise InvariantError(f"a row has more than {self.tokens.shape[1]} tokens")
        self.tokens[rows, positions] = tokens
        self.num_tokens[rows] += 1

    def keep_verified(self, row: int, tokens: Int32Array) -> None:
        """Append what a row with a draft keeps, and count as run what need not run again."""
        first = int(self.num_tokens[row])
        self.tokens[row, first : first + len(tokens)] = tokens
        self.num_tokens[row] = first + len(tokens)
        self.num_new_tokens[row] = len(tokens)

    def _draft(self, draft: Draft) -> None:
        row, count = draft.row, len(draft.tokens)
        self._check_known(np.array([row], dtype=np.int32), "given a draft")
        known = int(self.num_tokens[row])
        end = int(self.num_computed_tokens[row] + self.num_new_tokens[row])
        # One token more than is drafted is sampled, and must have its place.
        if end != known + count or end >= self.tokens.shape[1] or not count:
            raise InvariantError(
                f"row {row} is to verify {count} tokens behind its {known}, and runs up to {end} "
                f"of {self.tokens.shape[1]}"
            )
        if draft.tokens.min() < 0 or draft.tokens.max() >= self._vocab_size:
            raise InvariantError(f"row {row} drafts a token that is not in the vocabulary")
        self.tokens[row, known:end] = draft.tokens
        self.num_drafted[row] = count

    def _forget(self, rows: Int32Array | Int64Array) -> None:
        self._known[rows] = False
        self.num_new_tokens[rows] = 0
        self.embedded.forget(rows)
        self.sampling.forget(rows)
        if self.failures:
            for row in rows.tolist():
                self.failures.pop(row, None)

    def _fork(self, forked: tuple[ForkedRow, ...]) -> None:
        """Write what the parents know into the forked rows: each column is read, then written."""
        forks = fork_columns(forked, self._known, self.block_tables[0].num_blocks)
        rows, parents = forks.rows, forks.parents
        # Rows that stay in place keep their tokens: most of a beam's, and thousands each.
        moved = rows != parents
        if moved.any():
            longest = int(self.num_tokens[parents[moved]].max())
            self.tokens[rows[moved], :longest] = self.tokens[parents[moved], :longest]
        progress = (self.num_tokens, self.num_computed_tokens, self.num_new_tokens)
        for column in (*progress, self.adapter):
            column[rows] = column[parents]
        for tables in self.block_tables:
            tables.fork(rows, parents, forks.num_blocks)
        self.sampling.fork(rows, parents, forks.sequence_indices)
        self._known[rows] = True

        replaced, tokens = rows[forks.replaces_last], forks.last_tokens[forks.replaces_last]
        impossible = (tokens < 0) | (tokens >= self._vocab_size)
        self.tokens[replaced, self.num_tokens[replaced] - 1] = np.where(impossible, 0, tokens)
        if self.failures or impossible.any():
            reasons = [self.failures.get(parent) for parent in parents.tolist()]
            for row, reason in zip(rows.tolist(), reasons, strict=True):
                self.failures.pop(row, None)
                if reason is not None:
                    self.failures[row] = reason
            for row in replaced[impossible].tolist():
                self.failures.setdefault(row, self._bad_token())

    def _advance(self) -> None:
        """Count the previous step's tokens as computed, and plan one more for each row."""
        self.num_computed_tokens += self.num_new_tokens
        np.minimum(self.num_new_tokens, 1, out=self.num_new_tokens)

    def _admit(self, entry: AdmittedRow) -> None:
        row, count = entry.row, len(entry.tokens)
        self._check_range(np.array([row], dtype=np.int32))
        if not 1 <= count <= self.tokens.shape[1]:
            raise InvariantError(
                f"row {row} is admitted with {count} tokens, must be 1 to {self.tokens.shape[1]}"
            )
        if not 1 <= entry.num_samples <= len(self._known):
            raise InvariantError(
                f"row {row} is to sample {entry.num_samples} tokens, must be 1 to "
                f"{len(self._known)}, as many as there are rows"
            )
        if len(entry.block_tables) != len(self.block_tables):
            raise InvariantError(
                f"row {row} has {len(entry.block_tables)} block tables, not "
                f"{len(self.block_tables)}"
            )
        if len({len(table) for table in entry.block_tables}) > 1:
            raise InvariantError(f"row {row} has block tables of different lengths")
        self._known[row] = True
        self.tokens[row, :count] = entry.tokens
        self.num_tokens[row] = count
        self.num_computed_tokens[row] = entry.num_computed_tokens
        self.num_new_tokens[row] = entry.num_new_tokens
        for tables, blocks in zip(self.block_tables, entry.block_tables, strict=True):
            tables.replace(row, blocks)
        self.sampling.write(row, entry)
        self.adapter[row] = entry.adapter
        self.failures.pop(row, None)
        if not (entry.tokens.min() >= 0 and entry.tokens.max() < self._vocab_size):
            self.failures[row] = self._bad_token()
        if (reason := self.embedded.replace(row, entry)) is not None:
            self.failures[row] = reason
        if self.sampling.is_ruled[row] and not names_only(entry.sampling, self._vocab_size):
            self.failures[row] = self._bad_token()

    def _bad_token(self) -> str:
        return f"a token id is not in 0 to {self._vocab_size - 1}"

    def _append(self, plan: StepPlan) -> None:
        if len(plan.appended) > len(self.block_tables):
            raise InvariantError(
                f"{len(plan.appended)} KV groups gain blocks, the model has "
                f"{len(self.block_tables)}"
            )
        for tables, (rows, blocks) in zip(self.block_tables, plan.appended, strict=False):
            self._check_known(rows, "given blocks")
            tables.append(rows, blocks)

    def _check_known(self, rows: Int32Array, what: str) -> None:
        self._check_range(rows)
        if not self._known[rows].all():
            row = int(rows[np.argmin(self._known[rows])])
            raise InvariantError(f"row {row} is {what}, but was never admitted")

    def _check_range(self, rows: Int32Array) -> None:
        if len(rows) and not (rows.min() >= 0 and rows.max() < len(self._known)):
            raise InvariantError(
                f"rows {rows.min()} to {rows.max()} are named, there are 0 to "
                f"{len(self._known) - 1}"
            )
