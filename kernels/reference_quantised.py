"""What quantised weights stand for, and how inputs are rounded to meet them, in fp32."""

from typing import Final

import torch
from torch.nn import functional

from kernels.kept_weight import BITS, KeptWeight

GROUP: Final = 32
"""Inputs that share a scale."""


def dequantise(
    values: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor | None, zero_point: int
) -> torch.Tensor:
    """Return weights [O, I] fp32. Shapes: as in `quantised_linear.QuantisedWeight`."""
    columns = values.shape[1]
    each = scales.float().repeat_interleave(GROUP, 1)[:, :columns]
    if minimums is None:
        return (values.float() - zero_point) * each
    return values.float() * each + minimums.float().repeat_interleave(GROUP, 1)[:, :columns]


def round_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x as 8-bit numbers times a scale for each group. Shapes: x [T, I], returns fp32."""
    rows, columns = x.shape
    padded = functional.pad(x.float(), (0, -columns % GROUP))
    groups = padded.view(rows, padded.shape[1] // GROUP, GROUP)
    scales = groups.abs().amax(-1, keepdim=True) / 127
    factors = torch.where(scales > 0, 1 / scales, 0.0)
    return ((groups * factors).round() * scales).view(padded.shape)[:, :columns]


def kept_weight(weight: KeptWeight) -> torch.Tensor:
    """Return what a weight in words stands for. Shape: [O, I] fp32."""
    bits, panel, columns = BITS[weight.form], weight.panel, weight.num_inputs
    num_panels, rows = weight.words.shape[:2]
    values = torch.empty((rows, num_panels * panel), dtype=torch.uint8)
    per_half = panel * bits // 16
    for number in range(panel):
        place, within = divmod(number, per_half)
        word, half = divmod(within, 2)
        of_words = weight.words[:, :, word].cpu() >> (16 * half + bits * place)
        values[:, number::panel] = (of_words & ((1 << bits) - 1)).to(torch.uint8).T
    group = weight.group or num_panels * panel
    spread = (
        grid.cpu().float().T.repeat_interleave(group, 1)[:, :columns]
        for grid in (weight.scales, weight.zeros)
        if grid is not None
    )
    scales, zeros = next(spread), next(spread, float(weight.zero))
    dense = values.view(torch.float8_e4m3fn) if weight.form == "e4m3" else values
    return (dense[:, :columns].float() - zeros) * scales


def quantised_matmul(
    x: torch.Tensor, weight: KeptWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return x @ weight.T + bias in fp32. Shapes: as the kernel's."""
    product = x.float() @ kept_weight(weight).to(x.device).T
    return product if bias is None else product + bias.float()
