"""What a step asks of a worker, and what it answers: the worker's own view, as numpy columns."""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Int32Array: TypeAlias = npt.NDArray[np.int32]
Int64Array: TypeAlias = npt.NDArray[np.int64]
Float32Array: TypeAlias = npt.NDArray[np.float32]


def no_int32() -> Int32Array:
    """Return an empty column."""
    return np.empty(0, dtype=np.int32)


def no_float32() -> Float32Array:
    """Return an empty column."""
    return np.empty(0, dtype=np.float32)


class Pooling(IntEnum):
    """Which hidden states make a pooled vector; numbered as in the protocol."""

    LAST = 1
    """The last token's."""

    MEAN = 2
    """The mean over all tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class SamplingParams:
    """How one row's tokens are chosen from its logits."""

    temperature: float = 0.0
    """Divides the logits. 0 takes the most likely token."""

    top_k: int = 0
    """Keep this many of the most likely tokens. 0 keeps all."""

    top_p: float = 1.0
    """Keep the fewest most likely tokens that have this much probability. 1 keeps all."""

    min_p: float = 0.0
    """Keep tokens at least this probable, relative to the most likely one. 0 keeps all."""

    seed: int = 0
    """Unsigned 64 bits. With the sequence index and a token's position it fixes the draw."""

    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token in the output. 0: off."""

    frequency_penalty: float = 0.0
    """Subtracted once per occurrence in the output. 0: off."""

    repetition_penalty: float = 1.0
    """Divides positive, multiplies negative logits of tokens in prompt or output. 1: off."""

    min_tokens: int = 0
    """Tokens of output before which none of `stop_token_ids` may be drawn."""

    stop_token_ids: Int32Array = field(default_factory=no_int32)

    bias_token_ids: Int32Array = field(default_factory=no_int32)
    """[B] Each once. `bias_values` are added to their logits."""

    bias_values: Float32Array = field(default_factory=no_float32)
    """[B] Finite."""

    allowed_token_ids: Int32Array = field(default_factory=no_int32)
    """Only these may be drawn. Empty: all."""

    bad_words: tuple[Int32Array, ...] = ()
    """Sequences of tokens that the output must not have. None is empty."""


@dataclass(frozen=True, slots=True)
class EmbeddedSpan:
    """Vectors that stand in place of some of a row's tokens."""

    offset: int
    """Position of the first."""

    values: bytes
    """Vectors of the model's hidden size, one behind the other."""

    dtype: str
    """Of torch, by its name: float16, float32 or bfloat16."""


@dataclass(frozen=True, slots=True, eq=False)
class AdmittedRow:
    """Everything a worker needs to run a row it does not know."""

    row: int
    """Place in the worker's columns. Whatever was there is replaced."""

    request_id: str
    """For logs and traces only."""

    tokens: Int32Array
    """[num_tokens] Prompt and, for a resumed request, its output so far."""

    num_prompt_tokens: int
    """How many of the tokens are the prompt."""

    num_computed_tokens: int
    """Tokens whose keys and values are in the cache already."""

    num_new_tokens: int
    """Tokens to run in this step. 0 admits the row without running it."""

    block_tables: tuple[Int32Array, ...]
    """Per KV group, the ids of the row's blocks, in order."""

    sampling: SamplingParams

    sequence_index: int = 0
    """Which of a request's sequences this is. Distinguishes their draws."""

    num_samples: int = 1
    """Tokens to draw when the row first samples, one for each sequence index from its own on.

    The row keeps the first.
    """

    num_candidates: int = 0
    """Likeliest tokens to report wherever the row samples.

    It then takes the first of them, unless `logprobs` is set.
    """

    logprobs: bool = False
    """The drawn token's log-probability and rank are wanted; candidates stand beside it."""

    prompt_logprobs: int | None = None
    """Likeliest tokens to report at each position of the prompt, beside the prompt's own. 0: its
    own alone. None: nothing."""

    pooling: Pooling | None = None
    """A pooled hidden state is wanted in place of a token."""

    adapter: int = 0
    """Slot of the adapter that changes its layers. 0: none."""

    embeddings: tuple[EmbeddedSpan, ...] = ()
    """In place of tokens, as far as they are not computed yet; in order of position."""


class ForkedRow(NamedTuple):
    """A row that takes over tokens, blocks, sampling and progress of another, or of itself."""

    row: int
    """Place in the worker's columns. Whatever was there is replaced."""

    parent_row: int
    """The row it continues, as that was before all forks of the plan."""

    sequence_index: int
    """Which of a request's sequences it is."""

    last_token: int | None
    """Its last token. None: the parent's."""

    num_blocks: int
    """Blocks it takes over, the first of the parent's, in each KV group."""


class AppendedBlocks(NamedTuple):
    """Blocks that rows gain in one KV group: entry i puts `blocks[i]` behind those of `rows[i]`.

    A row that gains several has as many entries, in order.
    """

    rows: Int32Array
    blocks: Int32Array


class BlockCopies(NamedTuple):
    """Blocks to copy before the forward pass. No block is dst twice, nor both src and dst."""

    src: Int32Array
    dst: Int32Array


class Draft(NamedTuple):
    """Tokens that may follow a row's known ones. They run behind these, and are verified."""

    row: int
    tokens: Int32Array
    """[K]"""


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """The work of one step, as differences to the step before.

    The worker forgets (`reset`, `released_rows`), learns (`forked`, `admitted`, `appended`),
    copies, and advances: a row that ran in the previous plan has its new tokens computed and runs
    one more, except where an exception says otherwise.
    """

    step_id: int
    """The previous plan's id + 1, or any id with `reset`."""

    reset: bool
    """Forget all rows first."""

    released_rows: Int32Array
    """Rows to forget."""

    forked: tuple[ForkedRow, ...]
    """Rows that continue others. They advance as these do."""

    admitted: tuple[AdmittedRow, ...]
    """Rows to learn in full."""

    appended: tuple[AppendedBlocks, ...]
    """Per KV group, the blocks that rows gain. May be empty: no row gains any."""

    copies: BlockCopies

    exception_rows: Int32Array
    """[E] Rows that do not advance by one token."""

    exception_num_computed_tokens: Int32Array
    """[E] Their computed tokens, before this step."""

    exception_num_new_tokens: Int32Array
    """[E] Their new tokens. 0: the row stays, but does not run."""

    drafts: tuple[Draft, ...] = ()
    """Tokens to verify, which the new tokens of their rows count. Such a row advances by as many
    tokens as it keeps of those it sampled."""


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Where a step's time went, in nanoseconds. The parts sum to less than the total."""

    prepare_ns: int
    """Plan to tensors."""

    forward_ns: int
    """Tensors to logits."""

    sample_ns: int
    """Logits to tokens."""

    total_ns: int
    """The whole step."""


class Candidates(NamedTuple):
    """The likeliest tokens of rows, the likeliest first, row after row."""

    ids: Int32Array
    """[C]"""

    logprobs: Float32Array
    """[C]"""

    counts: Int32Array
    """[S] How many each row has. They sum to C."""


class TokenLogprobs(NamedTuple):
    """What is told of sampled tokens, one entry each. Rows that did not ask have zeros."""

    logprobs: Float32Array
    """[T] At most 0."""

    ranks: Int32Array
    """[T] 1 is the likeliest."""


class PromptLogprobs(NamedTuple):
    """Log-probabilities of P neighbouring tokens of one row's prompt."""

    row: int

    offset: int
    """Position in the prompt of the first. At least 1: nothing predicts the first token."""

    logprobs: Float32Array
    """[P] Of the prompt's own tokens."""

    ranks: Int32Array
    """[P]"""

    candidate_ids: Int32Array
    """[P * K] The likeliest at each position, the likeliest first."""

    candidate_logprobs: Float32Array
    """[P * K]"""


class RowVector(NamedTuple):
    """The pooled hidden state of one row."""

    row: int

    values: Float32Array
    """[hidden size]"""


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """What a step brought."""

    step_id: int
    """The plan's id."""

    rows: Int32Array
    """[S] The rows that sampled, ascending."""

    tokens: Int32Array
    """[T] What they sampled, row after row. T is S, but for `num_tokens`."""

    timing: StepTiming

    row_errors: tuple[tuple[int, str], ...]
    """Rows that were to run and have failed, each with its reason. They sample nothing more."""

    num_tokens: Int32Array = field(default_factory=no_int32)
    """[S] How many tokens each row has. Empty: one each."""

    candidates: Candidates | None = None
    """What the rows could have sampled, where one of them was asked for that."""

    token_logprobs: TokenLogprobs | None = None
    """Of all tokens, where one of the rows asked for that."""

    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    """Of what rows that asked ran of their prompts, row after row."""

    vectors: tuple[RowVector, ...] = ()
    """Of pooled rows whose last token ran, row after row."""
