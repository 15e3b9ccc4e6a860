"""What a front end and the engine say to each other: plain data, so that one can leave home."""

from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

from scheduler_svc.core.beam_options import BeamOptions
from scheduler_svc.core.block_hash import ExtraKeys
from scheduler_svc.core.embedded_span import EmbeddedSpan
from scheduler_svc.core.miss_reason import MissReason
from scheduler_svc.core.reports import Reports
from scheduler_svc.core.request import FinishReason, Sampling
from scheduler_svc.core.told import PromptTable, TokenTold, Vector
from scheduler_svc.service.adapter_door import AdapterDoor
from scheduler_svc.service.server_state import Load, ServerState


@dataclass(frozen=True, slots=True)
class Submission:
    """A request as a front end hands it over: tokenized, validated, every value given."""

    request_id: str
    """Unique among its tenant's live requests, not empty."""

    tenant: str
    """On whose behalf. Empty: the default tenant."""

    token_ids: "array[int]"
    """The prompt: an `array('i')`, at least one token."""

    sampling: Sampling
    """How to sample. The seed is drawn already. Greedy with beams."""

    max_output_tokens: int | None
    """Most tokens to generate. None: as many as model length and pool allow."""

    min_output_tokens: int
    """Tokens before which no stop id ends the output."""

    eos_token_ids: frozenset[int]
    """Ids that end the model's turn. Empty: EOS is ignored."""

    stop_token_ids: frozenset[int]
    """Ids that end the output besides EOS."""

    salt: bytes
    """Separates this request's cached prefixes from those with another salt."""

    read_cache: bool
    """False: computes its whole prompt, hits or not."""

    priority: int
    """Lower goes first."""

    deadline_ns: int | None
    """Monotonic clock, nanoseconds. None: no deadline."""

    arrival_ns: int
    """Monotonic clock, nanoseconds."""

    traceparent: str
    """W3C trace context of the request's span. Empty: not traced."""

    num_sequences: int = 1
    """Sequences to sample from the one prompt, at least 1. 1 with beams."""

    beam: BeamOptions | None = None
    """Beam search in place of sampling."""

    adapter: str = ""
    """Name of a loaded adapter. Empty: none."""

    embeddings: tuple[EmbeddedSpan, ...] = ()
    """In place of tokens, in order of position, within the prompt."""

    reports: Reports = field(default_factory=Reports)
    """What is wanted beside tokens, or in place of them."""

    call_id: str = ""
    """What the caller named the call, where it has several requests. Empty: `request_id`."""

    @property
    def num_outputs(self) -> int:
        """Sequences that the stream will have."""
        return self.num_sequences if self.beam is None else self.beam.num_returned


@dataclass(frozen=True, slots=True)
class Accepted:
    """What the engine made of a submission."""

    request_id: str
    num_prompt_tokens: int

    max_output_tokens: int
    """The bound that holds, where the caller gave none as well."""

    seed: int


@dataclass(frozen=True, slots=True)
class Account:
    """What a request cost so far. Times are nanoseconds of the monotonic clock."""

    num_prompt_tokens: int

    num_output_tokens: int
    """Of all sequences."""

    num_cached_tokens: int
    """Prefix hits at the first admission."""

    num_recomputed_tokens: int
    """Tokens computed again after preemptions."""

    num_preemptions: int
    arrival_ns: int
    first_scheduled_ns: int | None

    first_token_ns: int | None
    """Of any sequence."""

    finished_ns: int | None
    """When the last sequence ended. None while the request lives."""

    first_step_id: int | None
    last_step_id: int | None
    preemption_times_ns: tuple[int, ...]

    miss_reason: MissReason | None = None
    """Why the prefix hit went no further. None until first admitted."""

    num_draft_tokens: int = 0
    """Tokens drafted and verified."""

    num_accepted_draft_tokens: int = 0
    """Of these, tokens that the model said."""


@dataclass(frozen=True, slots=True)
class Finish:
    """How a sequence ended."""

    reason: FinishReason

    stop_token_id: int | None
    """The stop id that ended it. None: EOS, or no id at all."""

    error: str
    """One sentence, with reason ERROR. Else empty."""

    cumulative_logprob: float | None = None
    """Of a hypothesis of beam search: natural logarithm of the probability of its output."""

    score: float | None = None
    """Of a hypothesis: that sum over its length to the power of the length penalty."""

    vector: Vector | None = None
    """The pooled hidden state, where one was asked for and could be computed."""


@dataclass(frozen=True, slots=True)
class Gain:
    """What one sequence gained since its stream was last read."""

    sequence_index: int
    """From 0. Of hypotheses the rank, 0 the best."""

    token_ids: tuple[int, ...]
    """May be empty if the sequence ends."""

    step_id: int
    """The step that sampled the last of them."""

    finish: Finish | None
    """Set in the last gain of a sequence, and only there."""

    told: tuple[TokenTold, ...] = ()
    """What is told of each of the tokens, where asked for."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """All that a stream gained since it was last read."""

    gains: tuple[Gain, ...]
    """At least one; at most one of each sequence, in their order."""

    account: Account | None
    """Set in the last batch of a stream, with which every sequence has ended; only there."""

    prompt_table: PromptTable | None = None
    """What is told of the prompt, where asked for: set in the first batch that has tokens."""


class TokenStream(Protocol):
    """The tokens of one live request. Ends after the batch whose `account` is set.

    Raises: SlowReaderError while iterating, when more tokens piled up than a stream may hold;
        UnavailableError, when no worker came or a drain's time ran out; DeadlineError.
    """

    @property
    def accepted(self) -> Accepted:
        """What was made of the submission."""

    def __aiter__(self) -> AsyncIterator[TokenBatch]:
        """Yield batches. One reader at a time."""

    def finish(self, sequence_index: int, num_output_tokens: int) -> None:
        """End a sequence after this many tokens: a stop string was found. The others go on.

        The sequence then ends with reason STOP, and the account counts only these tokens of
        it, even if it had ended by itself behind them. Does nothing once its last gain was
        read.
        """

    async def rest(self, seconds: float) -> None:
        """Let tokens pile up for so long, or until a sequence has ended."""

    def account(self) -> Account:
        """What the request cost so far; final once the `open` block is left."""


class EngineDoor(Protocol):
    """All that a front end can ask of the engine."""

    @property
    def adapters(self) -> AdapterDoor:
        """What requests can name as their adapter."""

    def open(self, submission: Submission) -> AbstractAsyncContextManager[TokenStream]:
        """Submit a request. Leaving the block ends it and frees all it holds, whatever the cause.

        Raises: RequestError kinds on entering. Nothing is queued then.
        """

    def abort(self, tenant: str, request_ids: Sequence[str] | None) -> tuple[list[str], list[str]]:
        """End a tenant's live requests with reason ABORT; None ends all it has.

        The id of a call ends all its requests; each has an id of its own beside it.

        Returns: ids that were live, those of calls if all were to end, and ids that were not.
        """

    def abort_everyone(self) -> list[str]:
        """End the live requests of all tenants with reason ABORT.

        Returns: the ids of their calls, of which those of several tenants may be equal.
        """

    def load(self) -> Load:
        """Return how busy the engine is now."""

    def server_state(self) -> ServerState:
        """Return what stands behind the door now."""

    def pin(self, tokens: "array[int]", extra: ExtraKeys, time_to_live_s: float) -> tuple[str, int]:
        """Keep what is cached of a prefix; return the pin's id and the number of its blocks.

        Raises: UnavailableError, PrefixNotCachedError, PinQuotaError; RequestError without a cache.
        """

    def unpin(self, pin_id: str) -> None:
        """Let go of a pin.

        Raises: UnknownPinError.
        """

    def flush_cache(self) -> int:
        """Forget the names of all cached blocks; return how many."""

    async def drain(self) -> None:
        """Refuse new requests, and return when none is left. Wait as long as the caller does."""

    def resume(self) -> None:
        """Take new requests again."""
