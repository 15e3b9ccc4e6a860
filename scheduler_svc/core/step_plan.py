"""What a worker shall compute in one step, and what it answered: columns, not objects."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.embedded_span import EmbeddedSpan
from scheduler_svc.core.reports import Pooling
from scheduler_svc.core.request import Request, Sampling
from scheduler_svc.core.told import PromptPart, TokenTold, Vector

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
IndexArray = npt.NDArray[np.intp]
"""Row numbers as numpy indexes with them: other integers cost a copy at each use."""

EMPTY: Int32Array = np.zeros(0, dtype=np.int32)
EMPTY.setflags(write=False)


@dataclass(frozen=True, slots=True)
class AdmittedRow:
    """A row in full: a new request, or a resumed one."""

    row: int
    """Its place in the block tables."""

    request_id: str
    """For logs and errors."""

    tokens: Int32Array
    """[num_tokens] Every known id, prompt and output."""

    num_prompt_tokens: int
    """How many of them are the prompt."""

    num_computed_tokens: int
    """How many have keys and values in the cache: prefix hits."""

    num_new_tokens: int
    """How many to run now. 0: the row waits."""

    block_tables: tuple[Int32Array, ...]
    """Block ids, one array per KV group."""

    sampling: Sampling
    """How its tokens are drawn."""

    sequence_index: int = 0
    """Number of the sequence within its request."""

    num_samples: int = 1
    """Tokens to draw when it first samples, for this sequence index and those that follow."""

    num_candidates: int = 0
    """Likeliest tokens to report wherever it samples.

    It then takes the first of them, unless `logprobs` is set.
    """

    logprobs: bool = False
    """The drawn token's log-probability is wanted."""

    prompt_logprobs: int | None = None
    """Likeliest tokens to report at each position of the prompt. None: nothing."""

    pooling: Pooling | None = None
    """A pooled hidden state is wanted in place of a token."""

    min_output_tokens: int = 0
    """Tokens of output before which no stop id may be drawn."""

    stop_token_ids: frozenset[int] = frozenset()
    """Those ids. Empty if any may be drawn at once."""

    adapter: int = 0
    """Slot of its adapter. 0: none."""

    embeddings: tuple[EmbeddedSpan, ...] = ()
    """In place of tokens, as far as they are not computed."""


@dataclass(frozen=True, slots=True)
class ForkedRow:
    """A row that takes over tokens, blocks, sampling and progress of another, or of itself.

    All forks of a plan see the rows as they were before any of them.
    """

    row: int
    """Its place. Whatever was there is replaced."""

    parent_row: int
    """The row it continues."""

    sequence_index: int
    """Number of the sequence within its request."""

    last_token: int | None
    """Its last token. None: the parent's."""

    num_blocks: int
    """Blocks it takes over, the first of the parent's."""


@dataclass(frozen=True, slots=True)
class AppendedBlocks:
    """Blocks that running rows gain in one KV group."""

    group: int
    """The KV group."""

    rows: Int32Array
    """[B] One row per block."""

    blocks: Int32Array
    """[B] The block, behind those the row has."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may follow a row's known ones, for the step to verify."""

    row: int

    tokens: Int32Array
    """[K] They run behind the row's last known token. The row samples behind that and behind each
    of these, keeps what it sampled up to the first token that is not the drafted one, and counts
    as having run as many tokens as it keeps."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The work of one forward pass, as a change against the plan before.

    Applied in the order of the fields. Then every row that ran in the previous plan advances
    by the tokens it ran there and runs one token more; admitted rows and exceptions say
    otherwise. Rows run in ascending order. A row whose run reaches its last known token
    samples, and the worker appends the sampled token to the row.
    """

    step_id: int
    """Counts up from 0 without gaps; 0 again after a reset."""

    reset: bool
    """The worker forgets every row first."""

    released_rows: Int32Array
    """Rows to forget."""

    forked: tuple[ForkedRow, ...]
    """Rows that continue others, and advance as these do. No parent is released."""

    admitted: tuple[AdmittedRow, ...]
    """Rows in full."""

    appended: tuple[AppendedBlocks, ...]
    """Blocks that rows gain."""

    copy_sources: Int32Array
    """Blocks to copy before the forward pass …"""

    copy_destinations: Int32Array
    """… and where to. None is a destination twice, nor source and destination."""

    exception_rows: Int32Array
    """[E] Rows that do not advance by one token."""

    exception_num_computed_tokens: Int32Array
    """[E] Their tokens already in the cache."""

    exception_num_new_tokens: Int32Array
    """[E] Their tokens to run now. 0: the row stays, and does not run."""

    num_rows: int
    """Rows that run. Not sent: for the shell's records."""

    num_tokens: int
    """Tokens that run. Not sent."""

    num_preempted: int
    """Requests preempted to make this plan. Not sent."""

    serial_rows: Int32Array = field(default_factory=lambda: EMPTY)
    """Rows that are not planned again before this step's result is applied."""

    drafts: tuple[Draft, ...] = ()
    """Tokens to verify. Their rows are serial, and their new tokens count the drafted ones."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """The likeliest tokens of rows, the likeliest first, row after row."""

    ids: Int32Array
    """[C]"""

    logprobs: Float32Array
    """[C]"""

    counts: Int32Array
    """[S] How many each row that sampled has. They sum to C."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave."""

    step_id: int
    """The plan's."""

    tokens: Int32Array
    """[T] Sampled ids, row after row in ascending order. T is S, but for `num_tokens`."""

    row_errors: tuple[tuple[int, str], ...] = ()
    """Rows that could not be computed, with the reason. They sampled nothing."""

    rows: Int32Array | None = None
    """[S] The rows that sampled, where the worker says so."""

    num_tokens: Int32Array | None = None
    """[S] How many tokens each of these rows has. None: one each."""

    candidates: Candidates | None = None
    """What the rows could have sampled, where one of them was asked for that."""

    logprobs: Float32Array | None = None
    """[T] Log-probabilities of the tokens, where one of the rows was asked for that …"""

    ranks: Int32Array | None = None
    """… and [T] their ranks. 0: this row was not asked."""

    prompt_parts: tuple[PromptPart, ...] = ()
    """What is told of prompts, at most one part a row."""

    vectors: tuple[tuple[int, Vector], ...] = ()
    """Rows whose pooled hidden state is wanted, and has come."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What applying a result changed, for the shell to pass on."""

    step_id: int
    """The step's."""

    requests: list[Request]
    """Live requests that gained a token …"""

    tokens: list[int]
    """… and the token of each."""

    finished: list[Request]
    """Requests that this step ended."""

    searching: list[Request] = field(default_factory=list)
    """Requests of beams that were answered, once for each beam; their tokens come at the end."""

    told: dict[Request, TokenTold] = field(default_factory=dict)
    """What is told of the tokens of requests that want to know."""
