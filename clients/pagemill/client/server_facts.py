"""What a server says about itself: how it is set, what it serves, how busy it is."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """One rank that has joined."""

    rank: int
    """Its number in the group."""

    boot_id: int
    """New with each process."""

    device: str
    """cpu, cuda:0 and so on."""

    dtype: str
    """Type of its activations."""

    phase: str
    """What it last said it was doing."""


@dataclass(frozen=True, slots=True)
class WorkerGroupInfo:
    """The ranks that hold one copy of the model."""

    group: int
    """Its number."""

    ready: bool
    """It takes plans."""

    epoch: int
    """Raised each time the whole group has joined."""

    num_blocks: int
    """Usable blocks of its pool; 0 until first ready."""

    workers: tuple[WorkerInfo, ...]
    """Its ranks."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """How a server is set."""

    version: str
    """Of the product."""

    protocol_version: int
    """Between scheduler and workers."""

    incarnation: int
    """Random, new with each scheduler process."""

    model_names: tuple[str, ...]
    """Served names, the default first."""

    block_size: int
    """Tokens in a block."""

    max_num_batched_tokens: int
    """Most tokens in one step."""

    max_num_seqs: int
    """Most rows in one step."""

    max_model_len: int
    """Most tokens of prompt and output together."""

    pipeline_depth: int
    """Most plans in flight."""

    groups: tuple[WorkerGroupInfo, ...]
    """Worker groups, joined or not."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a served model is."""

    model: str
    """The name that was asked for."""

    architecture: str
    """LlamaForCausalLM and so on."""

    vocab_size: int
    """Token ids are below this."""

    max_model_len: int
    """Most tokens of prompt and output together."""

    eos_token_ids: tuple[int, ...]
    """Ids that end a sequence."""

    has_chat_template: bool
    """It takes chat messages."""

    fingerprint: str
    """Hash of the weights; empty until a worker has joined."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Counters since the scheduler's start."""

    steps: int
    """Steps run."""

    prompt_tokens: int
    """Of admitted requests, each once."""

    generation_tokens: int
    """Tokens generated."""

    prefix_queries: int
    """Prompt tokens looked up in the prefix cache."""

    prefix_hits: int
    """Prompt tokens found there."""

    preemptions: int
    """Times a request lost its blocks."""

    recomputed_tokens: int
    """Tokens computed a second time."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Where a step's time went: means over recent steps, in seconds."""

    steps: int
    """Steps in the mean."""

    schedule_s: float
    """Deciding the plan."""

    encode_s: float
    """Encoding plan and decoding result."""

    wire_s: float
    """Round trip less the worker's time."""

    worker_wait_s: float
    """The plan lay in the worker behind its predecessor."""

    model_s: float
    """Inputs, forward pass and sampling."""

    emit_s: float
    """Applying the result and handing tokens to their streams."""

    step_s: float
    """From one result to the next."""


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a server is now."""

    running: int
    """Requests that hold blocks."""

    waiting: int
    """Requests in the queue."""

    used_blocks: int
    """In use by requests."""

    idle_cached_blocks: int
    """Without a user, their content still to be hit."""

    free_blocks: int
    """Empty."""

    total_blocks: int
    """The sum of the three."""

    waiting_tokens: int
    """Tokens of waiting requests."""

    totals: Totals
    """Counters since start."""

    recent_steps: StepTimes | None
    """None before the first step."""

    pinned_blocks: int
    """Of the used and the idle ones, those that a pin keeps."""


@dataclass(frozen=True, slots=True)
class Pin:
    """A prefix that stays in the cache."""

    pin_id: str
    """Names it, to let go of it."""

    num_blocks: int
    """Leading whole blocks of the prefix that were cached, and stay."""


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """An adapter that requests can name."""

    name: str

    generation: int
    """Of the content under the name: a hash of its files."""


@dataclass(frozen=True, slots=True)
class AbortResult:
    """What an abort met."""

    aborted: tuple[str, ...]
    """Ids that were live."""

    unknown: tuple[str, ...]
    """Ids that were not."""
