"""What a generation tells its caller: frozen events as they arrive, and their sum."""

from dataclasses import dataclass
from enum import StrEnum

from pagemill.client.errors import InternalError


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    """An end-of-sequence id, a stop id or a stop string."""

    LENGTH = "length"
    """max_tokens, or the model's length."""

    ABORT = "abort"
    """Somebody aborted the request."""

    ERROR = "error"
    """The sequence could not be computed."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One candidate at one position."""

    token_id: int
    """The candidate."""

    logprob: float
    """Natural logarithm of its probability, before temperature and penalties."""

    rank: int
    """1 is the likeliest."""

    text: bytes
    """The token's own bytes, which may be no valid character."""


PositionLogprobs = tuple[TokenLogprob, ...]
"""The drawn token first, then the likeliest others."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """First event: the request is in the queue."""

    request_id: str
    """Names the request in logs, traces and `abort`."""

    prompt_tokens: int
    """Tokens of the prompt, after the chat template."""

    seed: int
    """With it the output can be drawn again."""


@dataclass(frozen=True, slots=True)
class Delta:
    """New output of one sequence."""

    sequence_index: int
    """0 to n - 1. With beams the rank of the hypothesis, 0 the best."""

    token_ids: tuple[int, ...]
    """New ids."""

    text: str
    """New text; empty while a character or a stop string is incomplete."""

    logprobs: tuple[PositionLogprobs, ...]
    """One entry per new id, where asked for."""

    step_id: int
    """The step that sampled the last of the ids."""


@dataclass(frozen=True, slots=True)
class Finished:
    """One sequence ended; others may go on."""

    sequence_index: int
    """0 to n - 1. With beams the rank of the hypothesis, 0 the best."""

    reason: FinishReason
    """Why."""

    stop_match: str | int | None
    """The stop string or stop id that ended it. None: an end-of-sequence id, or not STOP."""

    cumulative_logprob: float | None
    """Sum over the output, where log-probabilities or beams were asked for."""

    score: float | None
    """Of a hypothesis of beam search; the highest is the best."""

    error: str
    """With reason ERROR: what could not be computed."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request."""

    prompt_tokens: int
    """Of the prompt, counted once."""

    completion_tokens: int
    """Of all sequences."""

    cached_tokens: int
    """Prompt tokens found in the prefix cache at first admission."""

    recomputed_tokens: int
    """Computed a second time after preemptions."""

    draft_tokens: int = 0
    """Drafted and verified. 0 without speculation."""

    accepted_draft_tokens: int = 0
    """Of these, tokens that the model said: each saved a step."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Where a request's seconds went, by the server's clock."""

    queue_s: float
    """From arrival to the first step."""

    ttft_s: float
    """From arrival to the first token."""

    total_s: float
    """From arrival to the end."""

    preemptions: int
    """How often the request lost its blocks."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Last event: the account of the request."""

    usage: Usage
    """Its tokens."""

    timing: Timing
    """Its seconds."""

    prompt_logprobs: tuple[PositionLogprobs, ...]
    """One entry per prompt position, the first empty, where asked for."""


Event = Accepted | Delta | Finished | Summary
"""In this order: Accepted, then deltas and ends of sequences, then Summary."""


@dataclass(frozen=True, slots=True)
class Output:
    """One finished sequence."""

    text: str
    """All its text."""

    token_ids: tuple[int, ...]
    """All its ids."""

    logprobs: tuple[PositionLogprobs, ...]
    """One entry per id, where asked for."""

    finished: Finished
    """How it ended."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request."""

    accepted: Accepted
    """Its name, prompt length and seed."""

    sequences: tuple[Output, ...]
    """One per sequence, by index; with beams the best first."""

    summary: Summary
    """Its account."""

    @property
    def text(self) -> str:
        """Text of the first sequence."""
        return self.sequences[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Ids of the first sequence."""
        return self.sequences[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """How the first sequence ended."""
        return self.sequences[0].finished.reason

    @property
    def usage(self) -> Usage:
        """Its tokens."""
        return self.summary.usage

    @property
    def timing(self) -> Timing:
        """Its seconds."""
        return self.summary.timing


class Collector:
    """Adds events up to a Completion."""

    __slots__ = ("_accepted", "_deltas", "_finished", "_summary")

    def __init__(self) -> None:
        self._accepted: Accepted | None = None
        self._deltas: dict[int, list[Delta]] = {}
        self._finished: dict[int, Finished] = {}
        self._summary: Summary | None = None

    def add(self, event: Event) -> None:
        """Take the next event of a stream."""
        match event:
            case Accepted():
                self._accepted = event
            case Delta():
                self._deltas.setdefault(event.sequence_index, []).append(event)
            case Finished():
                self._finished[event.sequence_index] = event
            case Summary():
                self._summary = event

    def finished(self, sequence_index: int) -> Output | None:
        """Return a sequence, if it has ended."""
        return self._output(sequence_index) if sequence_index in self._finished else None

    def completion(self) -> Completion:
        """Return the sum.

        Raises: InternalError if the stream ended before its summary.
        """
        if self._accepted is None or self._summary is None or not self._finished:
            raise InternalError("the stream ended without its summary")
        sequences = tuple(self._output(index) for index in sorted(self._finished))
        return Completion(self._accepted, sequences, self._summary)

    def _output(self, index: int) -> Output:
        deltas = self._deltas.get(index, [])
        return Output(
            text="".join(delta.text for delta in deltas),
            token_ids=tuple(token for delta in deltas for token in delta.token_ids),
            logprobs=tuple(position for delta in deltas for position in delta.logprobs),
            finished=self._finished[index],
        )
