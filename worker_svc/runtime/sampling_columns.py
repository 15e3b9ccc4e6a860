"""How each row's tokens are chosen: SamplingParams, turned by 90 degrees."""

import numpy as np

from worker_svc.runtime.logit_rules import LogitRules, read_rules
from worker_svc.runtime.step_plan import AdmittedRow, Int32Array, Int64Array

NO_PROMPT_LOGPROBS = -1

_COLUMNS = (
    "is_ruled",
    "logprobs",
    "min_p",
    "num_candidates",
    "num_prompt",
    "num_samples",
    "pooling",
    "prompt_logprobs",
    "seed",
    "sequence_index",
    "temperature",
    "top_k",
    "top_p",
)


class SamplingColumns:
    """One entry per row in every column."""

    __slots__ = (*_COLUMNS, "asking", "rules")

    def __init__(self, max_rows: int) -> None:
        self.temperature = np.zeros(max_rows, dtype=np.float64)
        self.top_k = np.zeros(max_rows, dtype=np.int64)
        self.top_p = np.ones(max_rows, dtype=np.float64)
        self.min_p = np.zeros(max_rows, dtype=np.float64)
        self.seed = np.zeros(max_rows, dtype=np.uint64)
        self.sequence_index = np.zeros(max_rows, dtype=np.int64)
        self.num_prompt = np.zeros(max_rows, dtype=np.int64)
        # Tokens to draw when the row next samples: 1 once it has.
        self.num_samples = np.ones(max_rows, dtype=np.int64)
        self.num_candidates = np.zeros(max_rows, dtype=np.int64)
        self.logprobs = np.zeros(max_rows, dtype=np.bool_)
        self.prompt_logprobs = np.full(max_rows, NO_PROMPT_LOGPROBS, dtype=np.int64)
        # As `Pooling`. 0: the row samples.
        self.pooling = np.zeros(max_rows, dtype=np.int64)
        # Whether `rules` has an entry for the row; most have none, and cost nothing.
        self.is_ruled = np.zeros(max_rows, dtype=np.bool_)
        self.rules: dict[int, LogitRules] = {}
        # Rows that ask for more than a token each step, rules apart. Mostly there are none, and the
        # columns that say what they ask for need not be looked at.
        self.asking: set[int] = set()

    def write(self, row: int, entry: AdmittedRow) -> None:
        """Replace what is known of one row."""
        params = entry.sampling
        # A row that reports candidates alone takes the first of them.
        greedy = entry.num_candidates > 0 and not entry.logprobs
        self.temperature[row] = 0.0 if greedy else params.temperature
        self.top_k[row] = params.top_k
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seed[row] = params.seed
        self.sequence_index[row] = entry.sequence_index
        self.num_prompt[row] = entry.num_prompt_tokens
        self.num_samples[row] = entry.num_samples
        self.num_candidates[row] = entry.num_candidates
        self.logprobs[row] = entry.logprobs
        asked = entry.prompt_logprobs
        self.prompt_logprobs[row] = NO_PROMPT_LOGPROBS if asked is None else asked
        self.pooling[row] = entry.pooling or 0
        self._write_rules(row, read_rules(entry))
        asks = entry.logprobs or entry.num_candidates or entry.pooling or entry.num_samples > 1
        self._note_asking(row, asks=bool(asks) or asked is not None)

    def fork(self, rows: Int64Array, parents: Int64Array, sequence_indices: Int64Array) -> None:
        """Let rows sample as their parents did before the call, with indices of their own."""
        for name in _COLUMNS:
            column = getattr(self, name)
            column[rows] = column[parents]
        self.sequence_index[rows] = sequence_indices
        if self.asking:
            asking = [parent in self.asking for parent in parents.tolist()]
            for row, asks in zip(rows.tolist(), asking, strict=True):
                self._note_asking(row, asks=asks)
        if self.rules:
            taken = [self.rules.get(parent) for parent in parents.tolist()]
            for row, rules in zip(rows.tolist(), taken, strict=True):
                self._write_rules(row, rules)

    def forget(self, rows: Int32Array | Int64Array) -> None:
        """Drop the rules of rows that are released, and what they ask for."""
        if self.asking:
            self.asking.difference_update(rows.tolist())
        if self.rules:
            for row in rows.tolist():
                self._write_rules(row, None)

    def _note_asking(self, row: int, *, asks: bool) -> None:
        (self.asking.add if asks else self.asking.discard)(row)

    def _write_rules(self, row: int, rules: LogitRules | None) -> None:
        self.is_ruled[row] = rules is not None
        if rules is None:
            self.rules.pop(row, None)
        else:
            self.rules[row] = rules
