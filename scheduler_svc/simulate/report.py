"""What a replay says in the end, and the sums it is made of."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of durations, in seconds."""

    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One allocator under one load. Means are over the virtual time of measured steps.

    Measured are the steps up to the one that admits the last request: while the load empties out
    at the end, memory is not what limits it.
    """

    utilisation_of_pool: float
    """Slots that hold a token's keys and values, of all slots."""

    utilisation_of_allocated: float
    """The same, of the slots that requests hold."""

    mean_batch: float
    """Sequences that run in a step."""

    blocks_saved_share: float
    """Blocks that sharing saves, of the blocks that requests would hold without it."""

    hit_rate: float
    """Prompt tokens found in the prefix cache, of those looked up."""

    preemptions: int
    """Times a request lost its blocks."""

    recomputed_tokens: int
    """Tokens computed again after that."""

    pauses: int
    """Rows that needed a block and did not run for a step, each step."""

    requests: int
    """Requests that ended."""

    refused: int
    """Requests that could never be served: too long for the model or the memory."""

    prompt_tokens: int
    """Of the requests that ended."""

    generation_tokens: int
    """Tokens generated."""

    steps: int
    """All steps, measured or not."""

    virtual_s: float
    """From the first arrival to the last token."""

    generation_tokens_per_s: float
    """Over all of that time."""

    ttft_s: Percentiles
    """From arrival to the first token."""

    itl_s: Percentiles
    """Between two tokens of a request."""


@dataclass(slots=True)
class Memory:
    """Integrals over the virtual time of measured steps."""

    time_ns: int = 0
    """Length of the steps …"""

    rows: int = 0
    """… times the requests that run,"""

    slots_filled: int = 0
    """… times the slots that hold a token,"""

    slots_allocated: int = 0
    """… times the slots that requests hold,"""

    table_slots: int = 0
    """… times the slots they would hold without sharing."""

    def add(
        self,
        step_ns: int,
        *,
        num_rows: int,
        slots_filled: int,
        slots_allocated: int,
        table_slots: int,
    ) -> None:
        """Count a step."""
        self.time_ns += step_ns
        self.rows += step_ns * num_rows
        self.slots_filled += step_ns * slots_filled
        self.slots_allocated += step_ns * slots_allocated
        self.table_slots += step_ns * table_slots


@dataclass(slots=True)
class Waits:
    """How long clients waited, in nanoseconds."""

    first_tokens: list[int] = field(default_factory=list)
    """From arrival to the first token, one for each request."""

    gaps: list[Int64Array] = field(default_factory=list)
    """Between two tokens …"""

    gap_counts: list[Int64Array] = field(default_factory=list)
    """… and how many were that long."""

    def add_gaps(self, gaps: Int64Array) -> None:
        """Count some gaps, at least one."""
        if gaps.min() == gaps.max():
            # Rows that ran in the step before too, which is nearly always all of them.
            self.add_equal_gaps(int(gaps[0]), len(gaps))
        else:
            self.gaps.append(gaps)
            self.gap_counts.append(np.ones_like(gaps))

    def add_equal_gaps(self, gap_ns: int, count: int) -> None:
        """Count equal gaps."""
        self.gaps.append(np.array([gap_ns], dtype=np.int64))
        self.gap_counts.append(np.array([count], dtype=np.int64))

    def ttft(self) -> Percentiles:
        """Return the percentiles of the waits for a first token."""
        waits = np.array(self.first_tokens, dtype=np.int64)
        return _percentiles(waits, np.ones_like(waits))

    def itl(self) -> Percentiles:
        """Return the percentiles of the gaps."""
        if not self.gaps:
            return Percentiles(0.0, 0.0, 0.0)
        return _percentiles(np.concatenate(self.gaps), np.concatenate(self.gap_counts))


def _percentiles(values_ns: Int64Array, counts: Int64Array) -> Percentiles:
    """Return nearest-rank percentiles of values that occur so many times each."""
    if not len(values_ns):
        return Percentiles(0.0, 0.0, 0.0)
    order = np.argsort(values_ns, kind="stable")
    ranks = np.cumsum(counts[order])
    places = np.searchsorted(ranks, np.ceil(np.array([0.5, 0.9, 0.99]) * ranks[-1]))
    return Percentiles(*(float(value) / 1e9 for value in values_ns[order][places]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What is counted over the whole replay."""

    requests: int
    refused: int
    prompt_tokens: int
    generation_tokens: int
    steps: int
    virtual_ns: int
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    pauses: int = 0


def make_report(slots: int, memory: Memory, waits: Waits, totals: Totals) -> Report:
    """Return the report of a replay in a pool of so many slots."""
    virtual_s = totals.virtual_ns / 1e9
    return Report(
        utilisation_of_pool=_ratio(memory.slots_filled, slots * memory.time_ns),
        utilisation_of_allocated=_ratio(memory.slots_filled, memory.slots_allocated),
        mean_batch=_ratio(memory.rows, memory.time_ns),
        blocks_saved_share=_ratio(memory.table_slots - memory.slots_allocated, memory.table_slots),
        hit_rate=_ratio(totals.prefix_hits, totals.prefix_queries),
        preemptions=totals.preemptions,
        recomputed_tokens=totals.recomputed_tokens,
        pauses=totals.pauses,
        requests=totals.requests,
        refused=totals.refused,
        prompt_tokens=totals.prompt_tokens,
        generation_tokens=totals.generation_tokens,
        steps=totals.steps,
        virtual_s=virtual_s,
        generation_tokens_per_s=_ratio(totals.generation_tokens, virtual_s),
        ttft_s=waits.ttft(),
        itl_s=waits.itl(),
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
