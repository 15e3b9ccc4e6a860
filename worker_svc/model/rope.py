"""Rotary position embedding: how fast each pair of elements turns."""

import math

import torch

from worker_svc.model.model_config import RopeScaling


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> torch.Tensor:
    """Return the angle per position of each pair of elements. Shape: [D / 2] fp32.

    Source: rotary embedding, Su et al. 2021 (arXiv:2104.09864), pairs (i, i + D / 2); `linear`
        and `llama3` as in transformers, `modeling_rope_utils.py`.
    """
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if scaling is None:
        return frequencies
    stretched = frequencies / scaling.factor
    if scaling.kind == "linear":
        return stretched
    # llama3: slow pairs are stretched, fast ones are not, and those between are blended.
    turns = scaling.original_max_position * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return keep * frequencies + (1.0 - keep) * stretched
