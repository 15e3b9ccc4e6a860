"""What the engine says of itself, its workers and its cache: plain data."""

from collections.abc import Mapping
from dataclasses import dataclass

from scheduler_svc.core.miss_reason import MissReason
from scheduler_svc.service.step_record import StepTimes


@dataclass(frozen=True, slots=True)
class Totals:
    """Counters since start, as pagemill.v1.Totals."""

    steps: int
    prompt_tokens: int
    generation_tokens: int
    prefix_queries: int
    prefix_hits: int
    preemptions: int
    recomputed_tokens: int
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0


@dataclass(frozen=True, slots=True)
class CacheState:
    """How the prefix cache does."""

    hit_rate: float
    """Share of tokens found, over the latest 1,000 requests."""

    missed_tokens: Mapping[MissReason, int]
    """Tokens looked up and not found since start, by what ended the hit."""

    pinned_blocks: int
    """Blocks that are pinned, in use or idle."""

    broken_pins: int
    """Pins broken since start, to go on at all."""


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the engine is, as pagemill.v1.GetLoadResponse."""

    running: int
    waiting: int
    used_blocks: int
    idle_cached_blocks: int
    free_blocks: int
    total_blocks: int

    waiting_tokens: int
    """Tokens of waiting requests."""

    totals: Totals

    recent: StepTimes | None
    """Means over the last steps. None before the first."""

    cache: CacheState = CacheState(0.0, {}, 0, 0)

    adapters: int = 0
    """Adapters that requests can name."""


@dataclass(frozen=True, slots=True)
class WorkerState:
    """A rank that has joined."""

    rank: int
    boot_id: int
    device: str
    dtype: str

    phase: str
    """What the worker last said it was doing: loading, sizing, idle, running, stopping."""


@dataclass(frozen=True, slots=True)
class GroupState:
    """A worker group, joined or not."""

    number: int

    ready: bool
    """True: it takes plans."""

    epoch: int
    """Raised each time the whole group has joined. 0: never."""

    num_blocks: int
    """Usable blocks of its pool. 0 until first ready."""

    workers: tuple[WorkerState, ...]

    fingerprint: str
    """Hash of the weights, in hex. Empty until a worker has joined."""


@dataclass(frozen=True, slots=True)
class ServerState:
    """What stands behind the door."""

    incarnation: int
    """Random 64-bit number of this scheduler process."""

    draining: bool
    """True: new requests are refused."""

    groups: tuple[GroupState, ...]
