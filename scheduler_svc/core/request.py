"""One request: what was asked, and how far it has come."""

from array import array
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from scheduler_svc.core.beam_options import BeamOptions
from scheduler_svc.core.block_hash import NO_EXTRA_KEYS, BlockHash, ExtraKeys
from scheduler_svc.core.draft_record import DraftRecord
from scheduler_svc.core.embedded_span import EmbeddedSpan
from scheduler_svc.core.free_block_queue import BlockId
from scheduler_svc.core.miss_reason import MissReason
from scheduler_svc.core.reports import Reports
from scheduler_svc.core.told import PromptTable, Vector


class RequestKey(NamedTuple):
    """What a live request is found by: tenants choose ids without knowing of each other."""

    tenant: str
    request_id: str


class FinishReason(Enum):
    """Why a request ended."""

    STOP = "stop"
    """An end-of-sequence id, a stop id or a stop string."""

    LENGTH = "length"
    """Its own bound or the model's length."""

    ABORT = "abort"
    """Someone ended it."""

    ERROR = "error"
    """It could not be computed."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is drawn; every value is in its bound."""

    temperature: float
    """0 takes the most likely token."""

    top_k: int = 0
    """0: all."""

    top_p: float = 1.0
    """1: all."""

    min_p: float = 0.0
    """0: all."""

    seed: int = 0
    """64 bits. Draws are a function of (seed, sequence index, position) alone."""

    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token in the output. 0: off."""

    frequency_penalty: float = 0.0
    """Subtracted once per occurrence in the output. 0: off."""

    repetition_penalty: float = 1.0
    """Divides positive, multiplies negative logits of tokens in prompt or output. 1: off."""

    logit_bias: tuple[tuple[int, float], ...] = ()
    """Ids, each once, and what is added to their logits."""

    allowed_token_ids: tuple[int, ...] = ()
    """Only these may be drawn. Empty: all."""

    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of ids that the output must not have. None is empty."""


@dataclass(frozen=True, slots=True)
class Stopping:
    """When a request ends."""

    max_output_tokens: int | None
    """At least 1. None: as many as the model's length and the pool allow."""

    eos_token_ids: frozenset[int] = frozenset()
    """Ids that end the output as the model's own end of sequence."""

    stop_token_ids: frozenset[int] = frozenset()
    """Further ids that end the output, and are named as its stop."""

    min_output_tokens: int = 0
    """Tokens before any stop id counts."""


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One finished output of a beam search."""

    tokens: tuple[int, ...]
    """The generated ids, with the end-of-sequence id if that ended it."""

    cumulative_logprob: float
    """Of the generated ids."""

    score: float
    """`cumulative_logprob / len(tokens) ** length_penalty`."""

    reason: FinishReason
    """STOP or LENGTH."""

    stop_token_id: int | None = None
    """The stop id that ended it, unless that is the model's own end of sequence."""


class Request:
    """A prompt and its output so far.

    While the request runs, its tokens live in the scheduler's rows; `tokens` is complete
    while it waits and after it has finished.

    A request for several sequences is the root of a family: it runs the prompt for all of them,
    and is the first of them. The others are forked from it when the first tokens are there; from
    then on each member is a request of its own.
    """

    __slots__ = (
        "_children",
        "_root",
        "account",
        "adapter_slot",
        "admitted_tokens",
        "arrival_ns",
        "awaits_fork",
        "beam",
        "blocks",
        "computed_before_preemption",
        "deadline_ns",
        "drafts",
        "embeddings",
        "error",
        "extra",
        "finish_reason",
        "finished_ns",
        "first_scheduled_ns",
        "first_step_id",
        "first_token_ns",
        "hashes",
        "held_since_ns",
        "hypotheses",
        "index",
        "last_step_id",
        "limit",
        "miss_reason",
        "num_cached_tokens",
        "num_passes",
        "num_pending_tokens",
        "num_prompt_tokens",
        "num_recomputed_tokens",
        "num_reserved_rows",
        "num_sequences",
        "precedence",
        "preemption_times_ns",
        "priority",
        "prompt_table",
        "read_cache",
        "reports",
        "request_id",
        "row",
        "sampling",
        "sequence",
        "stop_token_id",
        "stopping",
        "tenant",
        "tokens",
        "tokens_when_admitted",
        "vector",
        "weight",
    )

    finish_reason: FinishReason | None
    miss_reason: MissReason | None

    def __init__(  # noqa: PLR0915 - a list of fields
        self,
        request_id: str,
        prompt: "array[int]",
        sampling: Sampling,
        stopping: Stopping,
        *,
        extra: ExtraKeys | None = None,
        read_cache: bool = True,
        priority: int = 0,
        tenant: str = "",
        weight: float = 1.0,
        arrival_ns: int = 0,
        deadline_ns: int | None = None,
        num_sequences: int = 1,
        beam: BeamOptions | None = None,
        adapter_slot: int = 0,
        embeddings: tuple[EmbeddedSpan, ...] = (),
        reports: Reports | None = None,
    ) -> None:
        self.request_id = request_id
        self.tokens = array("i", prompt)
        self.num_prompt_tokens = len(prompt)
        self.sampling = sampling
        self.stopping = stopping
        self.extra = extra or NO_EXTRA_KEYS
        self.read_cache = read_cache
        self.priority = priority
        """Lower goes first."""
        self.tenant = tenant
        self.weight = weight
        """Its tenant's share of tokens, relative to the weights of others. Above 0."""
        self.arrival_ns = arrival_ns
        self.deadline_ns = deadline_ns
        self.num_sequences = num_sequences
        self.beam = beam
        self.adapter_slot = adapter_slot
        """Where workers have the adapter of `extra`. 0: none."""
        self.embeddings = embeddings
        """What fills the spans of `extra`; kept to its end, for it may lose its blocks."""
        self.reports = reports or Reports()

        # The family.
        self.index = 0
        """Number of the sequence among those of its root."""
        self.awaits_fork = self.width > 1 or beam is not None
        """The prompt has not given the first tokens yet; but for the root, it is not queued."""
        self.num_reserved_rows = 0
        """Rows kept free for the members of a root that runs before its fork."""
        self.hypotheses: list[Hypothesis] = []
        """Outcome of a beam search, the best first."""
        self.prompt_table: PromptTable | None = None
        self.vector: Vector | None = None
        self._root: Request | None = None
        self._children: tuple[Request, ...] | None = None

        # Kept by the scheduler.
        self.sequence = -1
        """Order of arrival."""
        self.precedence = (0, 0, 0)
        """Order among those who wait, and among those who run. The queue gives it."""
        self.account: int | None = None
        """Where a fair queue counts its tokens."""
        self.limit = 0
        """Tokens at which the request ends: prompt and output."""
        self.row: int | None = None
        """Its row while it runs."""
        self.blocks: list[BlockId] = []
        """Its block tables while it runs, column by column: see `group_blocks`."""
        self.hashes: list[BlockHash] = []
        """Names of its full blocks, as far as they were needed."""
        self.num_pending_tokens = 0
        """Tokens of a preempted request that steps in flight still sample."""
        self.computed_before_preemption = 0
        """Tokens whose keys and values its last preemption threw away."""
        self.admitted_tokens = 0
        """Tokens found in the cache when it was last admitted."""
        self.tokens_when_admitted = 0
        """Tokens known when it was last admitted."""
        self.held_since_ns: int | None = None
        """When it first did not fit in its turn."""
        self.num_passes = 0
        """How many were admitted past it since."""

        # Facts for the account.
        self.num_cached_tokens = self.num_recomputed_tokens = 0
        self.preemption_times_ns: list[int] = []
        self.drafts: DraftRecord | None = None
        """How its drafts have done, if it had any."""
        self.first_scheduled_ns: int | None = None
        self.first_token_ns: int | None = None
        self.finished_ns: int | None = None
        self.first_step_id: int | None = None
        self.last_step_id: int | None = None
        self.finish_reason = self.miss_reason = None
        self.stop_token_id: int | None = None
        self.error = ""

    @property
    def key(self) -> RequestKey:
        """What it is found by while it lives."""
        return RequestKey(self.tenant, self.request_id)

    @property
    def width(self) -> int:
        """Rows that the whole family takes."""
        return self.beam.width if self.beam else self.num_sequences

    @property
    def num_samples(self) -> int:
        """Tokens that its row draws when it next samples: one for each member to be forked."""
        return self.num_sequences if self.awaits_fork else 1

    @property
    def root(self) -> "Request":
        """The member that was asked for, and runs the prompt."""
        return self._root or self

    @property
    def family(self) -> "tuple[Request, ...]":
        """All that may hold rows, the root first: one for each sequence, or for each beam."""
        if self._root is not None:
            return self._root.family
        if self._children is None:
            self._children = tuple(self._child(index) for index in range(1, self.width))
        return (self, *self._children)

    @property
    def members(self) -> "tuple[Request, ...]":
        """The sequences that were asked for, in order. A beam search is one, whatever its width."""
        return (self.root,) if self.root.beam else self.family

    @property
    def has_family(self) -> bool:
        """It is one of several that may share what they hold."""
        return self._root is not None or self.width > 1 or self.beam is not None

    @property
    def num_tokens(self) -> int:
        """Tokens known, while the request does not run."""
        return len(self.tokens)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated, while the request does not run."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_preemptions(self) -> int:
        """How often the request lost its blocks."""
        return len(self.preemption_times_ns)

    def output_token_ids(self) -> "array[int]":
        """Return the generated ids, while the request does not run."""
        return self.tokens[self.num_prompt_tokens :]

    def _child(self, index: int) -> "Request":
        child = Request(
            self.request_id,
            array("i"),
            self.sampling,
            self.stopping,
            extra=self.extra,
            read_cache=self.read_cache,
            priority=self.priority,
            tenant=self.tenant,
            weight=self.weight,
            arrival_ns=self.arrival_ns,
            deadline_ns=self.deadline_ns,
            adapter_slot=self.adapter_slot,
            embeddings=self.embeddings,
            reports=replace(self.reports, prompt_logprobs=None),
        )
        child.tokens, child.num_prompt_tokens = self.tokens, self.num_prompt_tokens
        child.index, child.awaits_fork, child._root = index, True, self
        child.sequence = self.sequence
        return child
