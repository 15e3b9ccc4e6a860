"""The arithmetic of attention on loaded tiles, shared by all attention kernels. No pointers."""

import triton
import triton.language as tl


@triton.jit
def to_log2_scores(products, scale, soft_cap, SOFT_CAPPED: tl.constexpr):
    """Turn dot products into scores to base 2: one multiplication, so that exp2 can serve."""
    LOG2E: tl.constexpr = 1.4426950408889634
    if SOFT_CAPPED:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1): right at both ends, where exp is 0 or infinity.
        doubled = products * (scale / soft_cap) * (2 * LOG2E)
        scores = soft_cap * LOG2E * (1.0 - 2.0 / (tl.exp2(doubled) + 1.0))
    else:
        scores = products * (scale * LOG2E)
    return scores


@triton.jit
def online_softmax(scores, best, total):
    """Return (weights, shrink, best, total) after one more tile of scores [rows, tokens].

    When a larger score appears, what was summed before it must be multiplied by `shrink`. A row
    that has seen no valid score keeps best = -inf, total = 0, and weights of 0, not NaN.

    Source: Milakov and Gimelshein 2018 (arXiv:1805.02867).
    """
    new_best = tl.maximum(best, tl.max(scores, 1))
    origin = tl.where(new_best == float("-inf"), 0.0, new_best)
    shrink = tl.exp2(best - origin)
    weights = tl.exp2(scores - origin[:, None])
    return weights, shrink, new_best, total * shrink + tl.sum(weights, 1)


@triton.jit
def normalise(acc, total):
    """Return acc / total; 0 for a row that attended to nothing."""
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def log2_sum(best, total):
    """Return the base-2 logarithm of the sum of exponentials; -inf for an empty row."""
    return tl.where(total == 0.0, float("-inf"), best + tl.log2(tl.where(total == 0.0, 1.0, total)))


@triton.jit
def blocks_of_tile(table_ptr, first, seen_from, end, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Return the block of each token from `first` on: one number if all share a block.

    Only entries of blocks with a token in [seen_from, end) are read: behind the end, and before a
    window, the table may hold anything. (The one pointer of this file: where keys and values lie
    is part of every attention kernel.)
    """
    if TILE <= BLOCK_SIZE:
        seen = (first + TILE > seen_from) & (first < end)
        block = tl.load(table_ptr + first // BLOCK_SIZE, seen, 0)
    else:
        position = first + tl.arange(0, TILE)
        seen = (position >= seen_from) & (position < end)
        block = tl.load(table_ptr + position // BLOCK_SIZE, seen, 0)
    return block
