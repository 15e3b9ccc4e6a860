"""Log-probabilities of tokens, sampled or of a prompt: from the raw logits, before all rules."""

from collections import deque
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt
import torch

from kernels import cpu_told, reference_told
from worker_svc.model.other_ranks import OtherRanks
from worker_svc.runtime.candidates import find_candidates
from worker_svc.runtime.rows import Rows
from worker_svc.runtime.sampling_columns import NO_PROMPT_LOGPROBS
from worker_svc.runtime.step_plan import (
    Float32Array,
    Int32Array,
    Int64Array,
    PromptLogprobs,
    TokenLogprobs,
    no_float32,
    no_int32,
)

# Prompt positions whose logits are there at once: 7 MB of bf16 at a vocabulary of 49,152. Linear
# layers on a CPU take 12 at a time.
_SLICE = 72

_NOT_FINITE = "the model's logits at a prompt position are not finite"


@torch.inference_mode()
def find_logprobs(
    logits: torch.Tensor, tokens: Int32Array, places: Int64Array | None = None
) -> TokenLogprobs:
    """Return the log-probability and the rank of tokens, each of one row of logits.

    Shapes: logits [S, V] of any float type; tokens, places (row t of token t, if not given), and
        both results [T].

    Numerics: the log-softmax in fp32; NaN if a logit of the row is NaN or +inf, or none is above
        -inf. Among equal logits the lower id is the more likely one, so a greedy token has rank 1,
        and ranks are the places in `find_candidates`.
    """
    if places is None:
        places = np.arange(len(tokens), dtype=np.int64)
    tell = cpu_told if logits.device.type == "cpu" else reference_told
    logprobs, ranks = tell.tell_tokens(
        logits,
        torch.from_numpy(places).to(logits.device),
        torch.from_numpy(tokens.astype(np.int32)).to(logits.device),
    )
    return TokenLogprobs(logprobs.cpu().numpy(), ranks.cpu().numpy())


def sampled_logprobs(
    logits: torch.Tensor, tokens: Int32Array, num_tokens: Int32Array, asked: npt.NDArray[np.bool_]
) -> TokenLogprobs | None:
    """Return what is told of sampled tokens, or None if no row asked.

    Shapes: logits [S, V] fp32, raw; tokens [T]; num_tokens [S], or empty for one each; asked [S].
    """
    if not asked.any():
        return None
    counts = num_tokens if len(num_tokens) else np.ones(len(asked), dtype=np.int32)
    source = np.repeat(np.arange(len(asked)), counts)
    told = np.flatnonzero(asked[source])
    found = TokenLogprobs(
        np.zeros(len(source), dtype=np.float32), np.zeros(len(source), dtype=np.int32)
    )
    found.logprobs[told], found.ranks[told] = find_logprobs(logits, tokens[told], source[told])
    return found


def find_prompt_logprobs(
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    rows: Rows,
    running: Int64Array,
    ranks: OtherRanks,
) -> tuple[PromptLogprobs, ...]:
    """Return what rows that asked have run of their prompts. A row that fails is noted in `rows`.

    Shapes: hidden [T, E], of the tokens of the `running` rows, row after row; `logits_of` makes
        [P, V] of [P, E].

    All ranks make the same calls; rank 0 tells, and its word on failures is everybody's.

    Cost: the LM head at each position, a slice at a time, so that memory is bounded.
    """
    if not rows.sampling.asking:
        return ()
    asked = rows.sampling.prompt_logprobs[running]
    places = np.flatnonzero(asked != NO_PROMPT_LOGPROBS)
    if not len(places):
        return ()
    counts = rows.num_new_tokens[running]
    begins = np.cumsum(counts) - counts
    found: dict[int, PromptLogprobs | None] = {}
    for place in places.tolist():
        row = int(running[place])
        first = int(rows.num_computed_tokens[row])
        # The last token of the prompt predicts no token of the prompt.
        last = min(first + int(counts[place]), int(rows.sampling.num_prompt[row]) - 1)
        if last <= first:
            continue
        own = rows.tokens[row, first + 1 : last + 1]
        states = hidden[int(begins[place]) : int(begins[place]) + last - first]
        slices = (logits_of(states[at : at + _SLICE]) for at in range(0, len(own), _SLICE))
        if ranks.shard.leads:
            found[row] = _told_of(row, first + 1, slices, own, int(asked[place]))
        else:
            found[row] = None
            deque(slices, maxlen=0)
    failed = np.array([part is None for part in found.values()], dtype=np.int32)
    for row, is_failed in zip(found, ranks.share_tokens(failed).tolist(), strict=True):
        if is_failed:
            rows.failures[row] = _NOT_FINITE
    return tuple(part for part in found.values() if part is not None)


def _told_of(
    row: int,
    offset: int,
    slices: Iterable[torch.Tensor],
    own: Int32Array,
    num_candidates: int,
) -> PromptLogprobs | None:
    """Return what is told of P neighbouring positions, or None if logits are no numbers.

    Shapes: slices, one after the other, [P, V]; own [P], the tokens that stand behind them. All
        slices are taken, whatever they hold.
    """
    parts: list[tuple[Float32Array, Int32Array, Int32Array, Float32Array]] = []
    is_finite, begin = True, 0
    for logits in slices:
        end = begin + len(logits)
        if not is_finite:
            continue
        tokens = find_logprobs(logits, own[begin:end])
        is_finite = not np.isnan(tokens.logprobs).any()
        if is_finite:
            ids, logprobs = no_int32(), no_float32()
            if num_candidates:
                best = find_candidates(logits, np.full(len(logits), num_candidates, dtype=np.int64))
                ids, logprobs = best.ids, best.logprobs
            parts.append((tokens.logprobs, tokens.ranks, ids, logprobs))
        begin = end
    if not is_finite:
        return None
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    return PromptLogprobs(row, offset, *columns)
