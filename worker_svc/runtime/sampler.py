"""Logits to tokens. A row's token depends on its logits, its parameters and its own draw only."""

import math
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from worker_svc.errors import InvariantError
from worker_svc.runtime.sampling_columns import SamplingColumns
from worker_svc.runtime.step_plan import Float32Array, Int32Array, Int64Array

Float64Array: TypeAlias = npt.NDArray[np.float64]
UInt64Array: TypeAlias = npt.NDArray[np.uint64]

# At or below this temperature the most likely token is taken: dividing by it would leave
# nothing else, and overflows.
GREEDY_TEMPERATURE = 1e-5

# Tokens whose logit, divided by the temperature, is this far below the best are ranked only if
# the draw falls among them: a draw from all of 49,152 takes 3 ms, from a few hundred 0.1 ms.
_LIKELY = 10.0
_ANY = float(np.finfo(np.float32).max)


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
    scores: Float32Array = logits.cpu().numpy()
    best = scores.argmax(axis=-1)
    # NaN counts as the largest, and +inf is; -inf is a token that cannot be.
    failed = ~np.isfinite(scores[np.arange(len(scores)), best])
    tokens = best.astype(np.int32)
    temperature = params.temperature[rows]
    drawing = np.flatnonzero((temperature > GREEDY_TEMPERATURE) & ~failed)
    if len(drawing):
        drawn = rows[drawing]
        indices = params.sequence_index[drawn]
        tokens[drawing] = _draw(scores, drawing, drawn, indices, positions[drawing], params)
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
        needed, places = np.unique(drawn, return_inverse=True)
        scores: Float32Array = logits[torch.from_numpy(needed).to(logits.device)].cpu().numpy()
        indices = params.sequence_index[rows[drawn]] + nth[drawing]
        several[drawing] = _draw(scores, places, rows[drawn], indices, positions[drawn], params)
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
    scores: Float32Array,
    places: Int64Array,
    rows: Int64Array,
    sequence_indices: Int64Array,
    positions: Int32Array,
    params: SamplingColumns,
) -> list[int]:
    """Draw a token from `scores[places[i]]`, as `rows[i]` does. Shapes: all but scores [D]."""
    draws = uniforms(params.seed[rows], sequence_indices, positions)
    return [
        _draw_token(
            scores[place],
            float(params.temperature[row]),
            int(params.top_k[row]),
            float(params.top_p[row]),
            float(params.min_p[row]),
            draw,
        )
        for place, row, draw in zip(places.tolist(), rows.tolist(), draws.tolist(), strict=True)
    ]


def _draw_token(
    logits: Float32Array,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    draw: float,
) -> int:
    """Return the token at `draw` in the cumulated probabilities, most likely first.

    That order makes every filter a cut: min_p, top_k and top_p each keep a head of it. They
    work in this order, each on what the one before has kept.
    """
    # How far each token's logit lies below the best, in units of the temperature.
    depths = (logits.max() - logits) / np.float32(temperature)
    if min_p > 0.0:
        heads: list[tuple[float, float | None]] = [(-math.log(min_p), None)]
    else:
        total = float(np.exp(-depths).sum(dtype=np.float64))
        heads = [(_LIKELY, total), (_ANY, None)]
    for floor, total_weight in heads:
        token = _draw_from_head(depths, floor, total_weight, top_k, top_p, draw)
        if token is not None:
            return token
    raise InvariantError("a draw from all tokens found none")


def _draw_from_head(
    depths: Float32Array, floor: float, total: float | None, top_k: int, top_p: float, draw: float
) -> int | None:
    """Draw from the tokens no deeper than `floor`. None if the answer may lie below it.

    `total` is the weight of all tokens, or None if those below the floor are cut off.
    """
    ids = np.flatnonzero(depths <= floor)
    # A depth, which is not negative, is ordered as its bits are. With the id behind it no two
    # keys are equal, so a sort need not be stable to put lower ids first: 2 ms for 49,152
    # against 8 (AVX-512).
    keys = np.sort(
        depths[ids].view(np.uint32).astype(np.uint64) << np.uint64(32) | ids.astype(np.uint64)
    )
    cumulated = np.cumsum(
        np.exp(-(keys >> np.uint64(32)).astype(np.uint32).view(np.float32)), dtype=np.float64
    )
    if top_k > 0:
        if top_k > len(ids) and total is not None:
            return None
        cumulated, total = cumulated[:top_k], None
    if top_p < 1.0:
        kept = int(np.searchsorted(cumulated, top_p * (total or cumulated[-1]))) + 1
        if kept > len(cumulated) and total is not None:
            return None
        cumulated, total = cumulated[:kept], None
    place = int(np.searchsorted(cumulated, draw * (total or cumulated[-1]), side="right"))
    if place >= len(cumulated):
        if total is not None:
            return None
        place = len(cumulated) - 1
    return int(keys[place] & np.uint64(0xFFFFFFFF))
