"""Logits to tokens: penalties, temperature, filters and a seeded draw, without a sort."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.checks import ACTIVATIONS, check_contiguous, check_device, check_rows

# At or below this temperature the most likely token is taken.
_GREEDY: tl.constexpr = tl.constexpr(1e-5)
_TILE = 1024


@dataclass(frozen=True, slots=True, eq=False)
class SamplingColumns:
    """How each row is sampled. All [R], contiguous, on the device of the logits."""

    temperature: torch.Tensor
    """fp32. At or below 1e-5 the most likely token is taken, the lowest id among equals."""

    top_k: torch.Tensor
    """int32. Tokens to keep; 0 keeps all."""

    top_p: torch.Tensor
    """fp32. Share of the probability to keep; 1 keeps all."""

    min_p: torch.Tensor
    """fp32. Least probability to keep, as a share of the largest; 0 keeps all."""

    seed: torch.Tensor
    """int64. The request's seed."""

    sequence_index: torch.Tensor
    """int32. Which of the request's sequences."""

    position: torch.Tensor
    """int32. Where in its sequence the new token will stand."""


@dataclass(frozen=True, slots=True, eq=False)
class PenaltyColumns:
    """What makes tokens that were there already less likely. Contiguous, on the device."""

    repetition: torch.Tensor
    """[R] fp32. Positive logits of seen tokens are divided by it, others multiplied; 1 is none."""

    frequency: torch.Tensor
    """[R] fp32. Subtracted for each time the token was generated."""

    presence: torch.Tensor
    """[R] fp32. Subtracted if the token was generated."""

    output_counts: torch.Tensor
    """[R, V] int32. How often each token was generated."""

    in_prompt: torch.Tensor
    """[R, V] bool. Whether the prompt has the token."""


def sample(
    logits: torch.Tensor, params: SamplingColumns, penalties: PenaltyColumns | None = None
) -> torch.Tensor:
    """Return one token per row; -1 for a row with a NaN, a +inf, or nothing but -inf.

    Penalties change the logits, temperature divides them; then min_p, top_k and top_p each keep
    a head of what is left, most likely first. Tokens as likely as the last one kept are kept too.
    The draw adds Gumbel noise and takes the largest, which is a draw from the softmax. A token's
    noise is a function of (seed, sequence index, position, token) alone: the same in any batch.

    Shapes:
        logits   [R, V]  fp16, bf16 or fp32; each row contiguous; V below 2**31
        returns  [R]     int32

    Raises: ValueError if a shape, layout or dtype is not as above. Values are not read.
    Numerics: in fp32. A filter's cut is exact in fp32 depths, but that sums of weights near a
        top_p may round to its other side.
    Cost: reads the logits once for a greedy row, twice for a plain draw. top_k and top_p find
        their cuts by 16-way search over the 31 bits of a logit's depth: at most 8 more reads each,
        from the L2 cache, where a sort would write, too.
    Source: Gumbel-max, Gumbel 1954; Philox, Salmon et al. 2011.
    """
    if logits.dim() != 2 or logits.dtype not in ACTIVATIONS:
        raise ValueError(f"logits is {list(logits.shape)} {logits.dtype}, must be [R, V]")
    R, V = logits.shape
    check_rows("logits", logits)
    _check_columns(logits, params, penalties)
    tokens = torch.empty(R, dtype=torch.int32, device=logits.device)
    if R == 0:
        return tokens
    _sample[(R,)](
        logits,
        params.temperature,
        params.top_k,
        params.top_p,
        params.min_p,
        params.seed,
        params.sequence_index,
        params.position,
        None if penalties is None else penalties.repetition,
        None if penalties is None else penalties.frequency,
        None if penalties is None else penalties.presence,
        None if penalties is None else penalties.output_counts,
        None if penalties is None else penalties.in_prompt.view(torch.uint8),
        tokens,
        logits.stride(0),
        V,
        TILE=_TILE,
        num_warps=8,
        enable_fp_fusion=True,
    )
    return tokens


def _check_columns(
    logits: torch.Tensor, params: SamplingColumns, penalties: PenaltyColumns | None
) -> None:
    R, V = logits.shape
    wanted: list[tuple[str, torch.Tensor, torch.dtype, tuple[int, ...]]] = [
        ("temperature", params.temperature, torch.float32, (R,)),
        ("top_k", params.top_k, torch.int32, (R,)),
        ("top_p", params.top_p, torch.float32, (R,)),
        ("min_p", params.min_p, torch.float32, (R,)),
        ("seed", params.seed, torch.int64, (R,)),
        ("sequence_index", params.sequence_index, torch.int32, (R,)),
        ("position", params.position, torch.int32, (R,)),
    ]
    if penalties is not None:
        wanted += [
            ("repetition", penalties.repetition, torch.float32, (R,)),
            ("frequency", penalties.frequency, torch.float32, (R,)),
            ("presence", penalties.presence, torch.float32, (R,)),
            ("output_counts", penalties.output_counts, torch.int32, (R, V)),
            ("in_prompt", penalties.in_prompt, torch.bool, (R, V)),
        ]
    for name, column, dtype, shape in wanted:
        if column.shape != shape or column.dtype != dtype:
            raise ValueError(
                f"{name} is {list(column.shape)} {column.dtype}, must be {list(shape)} {dtype}"
            )
        check_contiguous(**{name: column})
        check_device(logits, **{name: column})


@triton.jit
def _sample(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seed_ptr,
    sequence_index_ptr,
    position_ptr,
    repetition_ptr,
    frequency_ptr,
    presence_ptr,
    output_counts_ptr,
    in_prompt_ptr,
    tokens_ptr,
    logits_stride,
    vocabulary,
    TILE: tl.constexpr,
):
    """One program per row. Tiles: logits, depths, noise [TILE]; sums below pivots [TILE, 16].

    A token's depth is how far its logit lies below the best, in units of the temperature. It is
    not negative, so its bits are ordered as it is: a cut is an integer.
    """
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    repetition, frequency, presence = 1.0, 0.0, 0.0
    if output_counts_ptr is not None:
        output_counts_ptr += row * vocabulary
        in_prompt_ptr += row * vocabulary
        repetition = tl.load(repetition_ptr + row)
        frequency = tl.load(frequency_ptr + row)
        presence = tl.load(presence_ptr + row)

    lane = tl.arange(0, TILE)
    bests = tl.full([TILE], float("-inf"), tl.float32)
    ids = lane
    failed = tl.zeros([TILE], tl.int32)
    for start in range(0, vocabulary, TILE):
        logit = _load_logits(
            logits_ptr, output_counts_ptr, in_prompt_ptr, start, vocabulary, repetition, frequency,
            presence, TILE,
        )  # fmt: skip
        # Neither NaN nor +inf is below +inf.
        failed |= (logit < float("inf")).to(tl.int32) ^ 1
        better = logit > bests
        bests = tl.where(better, logit, bests)
        ids = tl.where(better, start + lane, ids)
    best = tl.max(bests, 0)
    token = tl.min(tl.where(bests == best, ids, 2147483647), 0)
    if (tl.max(failed, 0) > 0) | (best == float("-inf")):
        tl.store(tokens_ptr + row, -1)
        return
    temperature = tl.load(temperature_ptr + row)
    if temperature <= _GREEDY:
        tl.store(tokens_ptr + row, token)
        return

    # Nothing but -inf has the depth of infinity; the deepest token that can be drawn is above it.
    min_p = tl.load(min_p_ptr + row)
    cut = tl.full([], 0x7F7FFFFF, tl.int32)
    if min_p > 0.0:
        cut = tl.minimum(cut, tl.maximum(-tl.log(min_p), 0.0).to(tl.int32, bitcast=True))
    top_k = tl.load(top_k_ptr + row)
    if (top_k > 0) & (top_k < vocabulary):
        cut = _find_cut(
            logits_ptr, output_counts_ptr, in_prompt_ptr, vocabulary, repetition, frequency,
            presence, best, temperature, cut, top_k.to(tl.float32), False, TILE,
        )  # fmt: skip
    top_p = tl.load(top_p_ptr + row)
    if top_p < 1.0:
        cut = _find_cut(
            logits_ptr, output_counts_ptr, in_prompt_ptr, vocabulary, repetition, frequency,
            presence, best, temperature, cut, top_p, True, TILE,
        )  # fmt: skip

    seed = tl.load(seed_ptr + row)
    position = tl.load(position_ptr + row)
    sequence_index = tl.load(sequence_index_ptr + row)
    bests = tl.full([TILE], float("-inf"), tl.float32)
    ids = tl.zeros([TILE], tl.int32) + token
    for start in range(0, vocabulary, TILE):
        logit = _load_logits(
            logits_ptr, output_counts_ptr, in_prompt_ptr, start, vocabulary, repetition, frequency,
            presence, TILE,
        )  # fmt: skip
        depth = (best - logit) / temperature
        noisy = gumbel(seed, start + lane, position, sequence_index) - depth
        better = (depth.to(tl.int32, bitcast=True) <= cut) & (noisy > bests)
        bests = tl.where(better, noisy, bests)
        ids = tl.where(better, start + lane, ids)
    best = tl.max(bests, 0)
    tl.store(tokens_ptr + row, tl.min(tl.where(bests == best, ids, 2147483647), 0))


@triton.jit
def _load_logits(
    logits_ptr,
    output_counts_ptr,
    in_prompt_ptr,
    start,
    vocabulary,
    repetition,
    frequency,
    presence,
    TILE: tl.constexpr,
):
    """Return a tile of logits, penalised. Behind the vocabulary it is -inf."""
    token = start + tl.arange(0, TILE)
    inside = token < vocabulary
    logit = tl.load(logits_ptr + token, inside, float("-inf")).to(tl.float32)
    if output_counts_ptr is not None:
        count = tl.load(output_counts_ptr + token, inside, 0)
        seen = (count > 0) | (tl.load(in_prompt_ptr + token, inside, 0) > 0)
        repeated = tl.where(logit > 0.0, logit / repetition, logit * repetition)
        logit = tl.where(seen, repeated, logit)
        logit -= frequency * count.to(tl.float32)
        logit -= tl.where(count > 0, presence, 0.0)
    return logit


@triton.jit
def _find_cut(
    logits_ptr,
    output_counts_ptr,
    in_prompt_ptr,
    vocabulary,
    repetition,
    frequency,
    presence,
    best,
    temperature,
    deepest,
    target,
    WEIGHED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return the bits of the least depth down to which tokens reach the target.

    The target is a number of tokens or, WEIGHED, a share of the weight down to `deepest`. Each
    round cuts the interval of possible answers into 16 and keeps one part.
    """
    part = tl.arange(0, 16)
    low = tl.zeros([], tl.int32)
    high = deepest
    first = True
    while low < high:
        step = (high - low) // 16 + 1
        pivot = tl.minimum(low + step * (part + 1) - 1, high)
        sums = tl.zeros([16], tl.float32)
        for start in range(0, vocabulary, TILE):
            logit = _load_logits(
                logits_ptr, output_counts_ptr, in_prompt_ptr, start, vocabulary, repetition,
                frequency, presence, TILE,
            )  # fmt: skip
            depth = (best - logit) / temperature
            amount = tl.exp(-depth) if WEIGHED else tl.zeros_like(depth) + 1.0
            above = depth.to(tl.int32, bitcast=True)[:, None] <= pivot[None, :]
            sums += tl.sum(tl.where(above, amount[:, None], 0.0), 0)
        if first and WEIGHED:
            # The last pivot is the deepest depth: its sum is the whole.
            target = target * tl.max(sums, 0)
            first = False
        missed = tl.sum((sums < target).to(tl.int32), 0)
        low = tl.minimum(low + step * missed, high)
        high = tl.minimum(low + step - 1, high)
    return high


@triton.jit
def gumbel(seed, token, position, sequence_index):
    """Return standard Gumbel noise for each token."""
    counter = token.to(tl.uint32)
    zero = tl.zeros_like(counter)
    bits, _, _, _ = tl.philox(
        seed, counter, zero + position.to(tl.uint32), zero + sequence_index.to(tl.uint32), zero
    )
    # In (0, 1), and fine near 0, where the largest noise comes from.
    uniform = tl.minimum(bits.to(tl.float32) * 2.0**-32 + 2.0**-33, 0.99999994)
    series = uniform * (1.0 + uniform * (0.5 + uniform * (1.0 / 3.0)))
    exponential = tl.where(uniform < 2.0**-8, series, -tl.log(1.0 - uniform))
    return -tl.log(exponential)
