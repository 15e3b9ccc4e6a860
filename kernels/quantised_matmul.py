"""A product with weights of 4 or 8 bits, which become 16 bits in registers and nowhere else."""

import torch
import triton
import triton.language as tl

from kernels.checks import ACTIVATIONS, check_contiguous, check_device, check_rows
from kernels.kept_weight import BITS, KeptWeight
from kernels.tuned import matmul_tile, target_of

_SUMMED = 1024
"""Outputs of one program that adds splits."""


def quantised_matmul(
    x: torch.Tensor,
    weight: KeptWeight,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x @ weight.T + bias.

    Shapes:
        x      [T, I]  fp16, bf16 or fp32; each token contiguous
        bias   [O]     dtype of x
        out    [T, O]  dtype of x; each token contiguous; new if not given

    Raises: ValueError if a shape, layout or dtype is not as above.
    Numerics: weights are exact but for their scales, which multiply the sums of groups in fp32;
        the result is rounded once. fp32 products as `Target.fp32_products` says. How a sum is
        split depends on T and the GPU, so that fp32 noise does, too.
    Cost: reads the weight once for each tile of tokens (up to 128), and x. With few tokens the
        long sum is split: the parts are written and read once, in fp32, by a second launch.
    Source: words and magic numbers as in Marlin (arXiv:2408.11743), 3.3; the layout is our own.
    """
    if x.dim() != 2 or x.dtype not in ACTIVATIONS or x.shape[1] != weight.num_inputs:
        raise ValueError(
            f"x is {list(x.shape)} {x.dtype}, must be [T, {weight.num_inputs}] of {ACTIVATIONS}"
        )
    T, O = len(x), weight.num_outputs  # noqa: E741
    if bias is not None and (bias.shape != (O,) or bias.dtype != x.dtype):
        raise ValueError(f"bias is {list(bias.shape)} {bias.dtype}, must be [{O}] {x.dtype}")
    if out is None:
        out = x.new_empty((T, O))
    if out.shape != (T, O) or out.dtype != x.dtype:
        raise ValueError(f"out is {list(out.shape)} {out.dtype}, must be [{T}, {O}] {x.dtype}")
    check_rows("x", x)
    check_rows("out", out)
    zeros = weight.scales if weight.zeros is None else weight.zeros
    check_device(x, words=weight.words, scales=weight.scales, zeros=zeros, out=out)
    check_contiguous(words=weight.words, scales=weight.scales, zeros=zeros)
    if bias is not None:
        check_device(x, bias=bias)
        check_contiguous(bias=bias)
    if T == 0:
        return out
    target, num_panels = target_of(x.device), len(weight.words)
    tile = matmul_tile(
        target, T, O, num_panels, weight.group, bits=BITS[weight.form], dtype=x.dtype
    )
    parts = out if tile.splits == 1 else torch.empty(
        (tile.splits, T, O), dtype=torch.float32, device=x.device
    )  # fmt: skip
    grid = (triton.cdiv(T, tile.rows), triton.cdiv(O, tile.columns), tile.splits)
    _quantised_matmul[grid](
        x, weight.words, weight.scales, zeros, out if bias is None else bias, parts, x.stride(0),
        parts.stride(-2), T, O, weight.num_inputs, num_panels, FORM=weight.form,
        PANEL=weight.panel, GROUP=weight.group or weight.panel, IS_WHOLE=not weight.group,
        ZERO=weight.zero,
        HAS_ZEROS=weight.zeros is not None, HAS_BIAS=bias is not None,
        IS_EVEN=weight.num_inputs % weight.panel == 0,
        ROWS=tile.rows, COLUMNS=tile.columns, SPLITS=tile.splits,
        DOT=tl.float32 if target.interpreted else None, PRECISION=target.fp32_products,
        num_warps=tile.num_warps, num_stages=tile.num_stages, enable_fp_fusion=True,
    )  # fmt: skip
    if tile.splits > 1:
        _sum_splits[(T, triton.cdiv(O, _SUMMED))](
            parts, out if bias is None else bias, out, out.stride(0), T, O,
            HAS_BIAS=bias is not None, SPLITS=tile.splits, SIZE=_SUMMED, num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def _quantised_matmul(
    x_ptr,
    words_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    out_ptr,
    x_stride,
    out_stride,
    num_tokens,
    num_outputs,
    num_inputs,
    num_panels,
    FORM: tl.constexpr,
    PANEL: tl.constexpr,
    GROUP: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    ZERO: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program per (tile of tokens, tile of outputs, split of the panels).

    Weights are the product's left side: that is the one a warpgroup takes from registers.

    Tiles: words [COLUMNS, W]; weights [COLUMNS, 2 * W]; x [2 * W, ROWS]; acc [COLUMNS, ROWS].
    """
    token = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    exists, inside = (token < num_tokens)[None, :], column < num_outputs
    IN: tl.constexpr = x_ptr.dtype.element_ty
    DTYPE: tl.constexpr = IN if DOT is None else DOT
    PLACES: tl.constexpr = 4 if FORM == "int4" else 2
    PIECE: tl.constexpr = PANEL // PLACES
    word, element = tl.arange(0, PIECE // 2), tl.arange(0, PIECE)
    share = tl.cdiv(num_panels, SPLITS)
    start = tl.program_id(2) * share
    scale, zero = tl.zeros([COLUMNS, 1], tl.float32), tl.zeros([COLUMNS, 1], tl.int32)
    if IS_WHOLE:
        scale, zero = _scale_and_zero(scales_ptr, zeros_ptr, column, inside, ZERO, HAS_ZEROS)

    acc = tl.zeros([COLUMNS, ROWS], tl.float32)
    for panel in range(start, tl.minimum(start + share, num_panels)):
        at = (tl.cast(panel, tl.int64) * num_outputs + column) * (PIECE // 2)
        words = tl.load(words_ptr + at[:, None] + word[None, :], inside[:, None], 0)
        part = tl.zeros([COLUMNS, ROWS], tl.float32)
        for place in tl.static_range(PLACES):
            first = panel * PANEL + place * PIECE
            if not IS_WHOLE and place * PIECE % GROUP == 0:
                at_group = tl.cast(first // GROUP, tl.int64) * num_outputs + column
                scale, zero = _scale_and_zero(
                    scales_ptr, zeros_ptr, at_group, inside, ZERO, HAS_ZEROS
                )
                part = tl.zeros([COLUMNS, ROWS], tl.float32)
            x_at = x_ptr + token[None, :] * x_stride + (first + element)[:, None]
            wanted = exists if IS_EVEN else exists & (first + element < num_inputs)[:, None]
            x = tl.load(x_at, wanted, 0.0).to(DTYPE)
            weights = _weights(words, place, zero, FORM, IN, DTYPE)
            if IS_WHOLE:
                acc = tl.dot(weights, x, acc, input_precision=PRECISION)
            else:
                part = tl.dot(weights, x, part, input_precision=PRECISION)
                if (place + 1) * PIECE % GROUP == 0:
                    acc += part * scale

    if IS_WHOLE:
        acc *= scale
    if FORM == "e4m3":
        acc *= 256.0
    if HAS_BIAS and SPLITS == 1:
        acc += tl.load(bias_ptr + column, inside, 0.0).to(tl.float32)[:, None]
    to = tl.program_id(2).to(tl.int64) * num_tokens + token
    out_at = out_ptr + to[None, :] * out_stride + column[:, None]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), exists & inside[:, None])


@triton.jit
def _scale_and_zero(scales_ptr, zeros_ptr, at, inside, ZERO: tl.constexpr, HAS_ZEROS: tl.constexpr):
    """Return the scale of each output, and its zero point times the two halves of a word."""
    scale = tl.load(scales_ptr + at, inside, 0.0).to(tl.float32)[:, None]
    zero = tl.full(at.shape, ZERO, tl.int32)
    if HAS_ZEROS:
        zero = tl.load(zeros_ptr + at, inside, 0).to(tl.int32)
    return scale, (zero * 0x00010001)[:, None]


@triton.jit
def _weights(
    words, place: tl.constexpr, zeros, FORM: tl.constexpr, IN: tl.constexpr, DOT: tl.constexpr
):
    """Return the weights of one place of each word, neighbours side by side: [COLUMNS, 2 * W].

    A 16-bit float whose last place counts ones holds a small integer in its lowest bits: 128 in
    bf16, 1024 in fp16. The zero point is taken off while they are integers, two in a word; so is
    a bias added that keeps them positive.
    """
    if FORM == "e4m3":
        # In float16's fields the number is 2**8 too small, which the scale makes good.
        byte = words >> (8 * place)
        pair = ((byte & 0x00800080) << 8) | ((byte & 0x007F007F) << 7)
    elif FORM == "int8":
        pair = ((words >> (8 * place)) & 0x00FF00FF) + (0x65006500 - zeros)
    elif IN.is_bf16():
        pair = ((words >> (4 * place)) & 0x000F000F) + (0x43104310 - zeros)
    else:
        pair = ((words >> (4 * place)) & 0x000F000F) + (0x64106410 - zeros)
    HALF: tl.constexpr = tl.bfloat16 if FORM == "int4" and IN.is_bf16() else tl.float16
    first = pair.to(tl.uint16).to(HALF, bitcast=True)
    second = (pair >> 16).to(tl.uint16).to(HALF, bitcast=True)
    both = tl.join(first, second).reshape(words.shape[0], 2 * words.shape[1])
    if FORM == "e4m3":
        weights = both.to(DOT)
    elif FORM == "int8":
        # Integers up to 510 are exact in fp16; up to 255, as the difference is, in bf16.
        weights = (both.to(DOT if DOT.is_fp32() else HALF) - 1280.0).to(DOT)
    elif IN.is_bf16():
        weights = both.to(DOT) - 144.0
    else:
        weights = both.to(DOT) - 1040.0
    return weights


@triton.jit
def _sum_splits(
    parts_ptr,
    bias_ptr,
    out_ptr,
    out_stride,
    num_tokens,
    num_outputs,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """One program per (token, tile of outputs). Tiles: parts, out [SIZE]."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = column < num_outputs

    total = tl.zeros([SIZE], tl.float32)
    for split in tl.static_range(SPLITS):
        at = (split * num_tokens + token) * num_outputs + column
        total += tl.load(parts_ptr + at, inside, 0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + column, inside, 0.0).to(tl.float32)

    out_at = out_ptr + token * out_stride + column
    tl.store(out_at, total.to(out_ptr.dtype.element_ty), inside)
