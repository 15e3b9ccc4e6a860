"""What quantised weights stand for, and how inputs are rounded to meet them, in fp32."""

from typing import Final

import torch
from torch.nn import functional

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
