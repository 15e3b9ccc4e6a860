"""Logits to tokens. A row's token depends on its logits, its parameters and its own draw only."""

from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kernels import cpu_draw
from worker_svc.runtime.sampling_columns import SamplingColumns
from worker_svc.runtime.step_plan import Int32Array, Int64Array

Float64Array: TypeAlias = npt.NDArray[np.float64]
UInt64Array: TypeAlias = npt.NDArray[np.uint64]

# At or below this temperature the most likely token is taken: dividing by it would leave
# nothing else, and overflows.
GREEDY_TEMPERATURE = 1e-5


class Sampler(Protocol):
    """Draws for rows. This module is one."""

    def sample(
        self,
        logits: torch.Tensor,
        rows: Int64Array,
        positions: Int32Array,
        params: SamplingColumns,
    ) -> tuple[Int32Array, npt.NDArray[np.bool_]]:
        """As `sample` below."""
        ...

    def sample_several(
        self,
        logits: torch.Tensor,
        tokens: Int32Array,
        rows: Int64Array,
        positions: Int32Array,
        params: SamplingColumns,
    ) -> tuple[Int32Array, Int32Array]:
        """As `sample_several` below."""
        ...


def sample(
    logits: torch.Tensor,
    rows: Int64Array,
    positions: Int32Array,
    params: SamplingColumns,
) -> tuple[Int32Array, npt.NDArray[np.bool_]]:
    """Return one token per row, and which rows have logits that are no numbers.

    Shapes: logits [S, V] fp32; rows, positions and both results [S]. `positions` says where in
        its sequence the new token will stand.

    Numerics: the logits of a row that is sampled are worked on in fp32, sums in fp64. Among
        equal logits the lower id is the more likely one, also for greedy rows.
    """
    logits = logits.cpu()
    tokens, scores = cpu_draw.likeliest(logits)
    # NaN counts as the largest, and +inf is; -inf is a token that cannot be.
    failed = ~np.isfinite(scores)
    draws = params.temperature[rows] > GREEDY_TEMPERATURE
    if draws.any():
        drawing = np.flatnonzero(draws & ~failed)
        drawn = rows[drawing]
        indices = params.sequence_index[drawn]
        tokens[drawing] = _draw(logits, drawing, drawn, indices, positions[drawing], params)
    return tokens, failed


def sample_several(
    logits: torch.Tensor,
    tokens: Int32Array,
    rows: Int64Array,
    positions: Int32Array,
    params: SamplingColumns,
) -> tuple[Int32Array, Int32Array]:
    """Return `num_samples` tokens per row, row after row, and how many each row has.

    The first is the one of `sample`, the nth what a row with the same logits and a sequence
    index higher by n would have.

    Shapes: logits [S, V] fp32, finite or -inf; tokens, from `sample`, rows and positions [S];
        returns [T] and [S].
    """
    counts = params.num_samples[rows]
    source, nth = number_samples(counts)
    several = tokens[source]
    drawing = np.flatnonzero((nth > 0) & (params.temperature[rows[source]] > GREEDY_TEMPERATURE))
    if len(drawing):
        drawn = source[drawing]
        indices = params.sequence_index[rows[drawn]] + nth[drawing]
        several[drawing] = _draw(
            logits.cpu(), drawn, rows[drawn], indices, positions[drawn], params
        )
    return several, counts.astype(np.int32)


def number_samples(counts: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return for each of all rows' samples whose it is, and which of that row's, from 0.

    Shapes: counts [S], samples of each row; returns [T] and [T], row after row.
    """
    source = np.repeat(np.arange(len(counts)), counts)
    return source, np.arange(len(source)) - np.repeat(np.cumsum(counts) - counts, counts)


def uniforms(
    seeds: UInt64Array, sequence_indices: Int64Array, positions: Int32Array
) -> Float64Array:
    """Return a number in [0, 1) for each triple, the same wherever and whenever it is asked for.

    Source: the output function of SplitMix64, Steele et al. 2014, as a hash: each word is
        mixed in behind the one before.
    """
    mixed = _mix(seeds.astype(np.uint64))
    for word in (sequence_indices, positions):
        mixed = _mix(mixed ^ word.astype(np.uint64))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(word: UInt64Array) -> UInt64Array:
    word = word + np.uint64(0x9E3779B97F4A7C15)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


def _draw(
    logits: torch.Tensor,
    places: Int64Array,
    rows: Int64Array,
    sequence_indices: Int64Array,
    positions: Int32Array,
    params: SamplingColumns,
) -> Int32Array:
    """Draw a token from `logits[places[i]]`, as `rows[i]` does. Shapes: all but logits [D]."""
    shares = uniforms(params.seed[rows], sequence_indices, positions)
    draws = cpu_draw.Draws(
        places=torch.from_numpy(places),
        temperatures=torch.from_numpy(params.temperature[rows]),
        top_ks=torch.from_numpy(params.top_k[rows]),
        top_ps=torch.from_numpy(params.top_p[rows]),
        min_ps=torch.from_numpy(params.min_p[rows]),
        shares=torch.from_numpy(shares),
    )
    tokens: Int32Array = cpu_draw.draw(logits, draws).numpy()
    return tokens
