"""What `sample` must compute, by sorting, in fp64."""

import numpy as np
import numpy.typing as npt
import torch

from kernels.sample import PenaltyColumns, SamplingColumns

UInt32Array = npt.NDArray[np.uint32]
_LOW = np.uint64(0xFFFFFFFF)


def noisy_scores(
    logits: torch.Tensor, params: SamplingColumns, penalties: PenaltyColumns | None = None
) -> torch.Tensor:
    """Return [R, V] fp64: the score whose largest is the token; -inf for tokens filtered out."""
    scores = logits.float()
    if penalties is not None:
        scores = penalised(scores, penalties)
    out = torch.full(scores.shape, -torch.inf, dtype=torch.float64)
    for row in range(len(scores)):
        if float(params.temperature[row]) <= 1e-5:
            out[row] = scores[row].double()
            continue
        depth = (scores[row].max() - scores[row]) / params.temperature[row]
        kept = kept_tokens(
            depth, int(params.top_k[row]), float(params.top_p[row]), float(params.min_p[row])
        )
        bits = philox(
            int(params.seed[row]),
            len(depth),
            int(params.position[row]),
            int(params.sequence_index[row]),
        )
        uniform = torch.from_numpy(bits.astype(np.float64)) * 2.0**-32 + 2.0**-33
        noise = -torch.log(-torch.log1p(-uniform))
        out[row][kept] = (noise - depth.double())[kept]
    return out


def penalised(scores: torch.Tensor, penalties: PenaltyColumns) -> torch.Tensor:
    """Return the logits after penalties. Shapes: [R, V] fp32."""
    seen = (penalties.output_counts > 0) | penalties.in_prompt
    repetition = penalties.repetition[:, None]
    repeated = torch.where(scores > 0, scores / repetition, scores * repetition)
    scores = torch.where(seen, repeated, scores)
    scores = scores - penalties.frequency[:, None] * penalties.output_counts
    return scores - penalties.presence[:, None] * (penalties.output_counts > 0)


def kept_tokens(depth: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Return which tokens the filters keep. Shapes: depth [V] fp32, returns [V] bool."""
    kept = depth.isfinite()
    if min_p > 0:
        kept &= depth <= -torch.tensor(min_p).log()
    if 0 < top_k < int(kept.sum()):
        kept &= depth <= depth[kept].sort().values[top_k - 1]
    if top_p < 1:
        ordered = depth[kept].sort().values
        cumulated = torch.exp(-ordered.double()).cumsum(0)
        reached = int(torch.searchsorted(cumulated, top_p * cumulated[-1]))
        kept &= depth <= ordered[min(reached, len(ordered) - 1)]
    return kept


def philox(seed: int, count: int, second: int, third: int) -> UInt32Array:
    """Return Philox 4x32-10's first word for the counters (0 .. count - 1, second, third, 0).

    Source: Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3.
    """
    zeros = np.zeros(count, dtype=np.uint64)
    counter = [np.arange(count, dtype=np.uint64), zeros + np.uint64(second & 0xFFFFFFFF)]
    counter += [zeros + np.uint64(third & 0xFFFFFFFF), zeros]
    key = [seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF]
    for _ in range(10):
        first, last = counter[0] * np.uint64(0xD2511F53), counter[2] * np.uint64(0xCD9E8D57)
        counter = [
            (last >> np.uint64(32)) ^ counter[1] ^ np.uint64(key[0]),
            last & _LOW,
            (first >> np.uint64(32)) ^ counter[3] ^ np.uint64(key[1]),
            first & _LOW,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return counter[0].astype(np.uint32)
