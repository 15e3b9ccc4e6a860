"""What the kernels around attention must compute, in fp32."""

from itertools import pairwise

import torch

from kernels.activation import Activation
from kernels.adapter_runs import AdapterRuns


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / rms(x) * weight in fp32. Shapes: x [T, E], weight [E]."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def norm_heads(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return each head as `rms_norm` leaves it, in fp32. Shapes: x [T, H, D], weight [H, D]."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def gelu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return gelu(gate) * up in fp32, gelu by tanh. Shapes: gate_up [T, 2 * I]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


def activate_and_mul(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return activation(gate) * up in fp32. Shapes: gate_up [T, 2 * I]."""
    return (gelu_and_mul if activation is Activation.GELU else silu_and_mul)(gate_up)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up in fp32. Shapes: gate_up [T, 2 * I]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return x rotated, in fp32. Shapes: x [T, heads, D]; cos, sin [T, D / 2] fp32."""
    low, high = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def multi_lora(
    x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor, runs: AdapterRuns
) -> torch.Tensor:
    """Return what the adapters add to y, in fp32. Shapes: as in `multi_lora.multi_lora`."""
    out = torch.zeros((len(x), b.shape[1]), dtype=torch.float32, device=x.device)
    starts = runs.starts.tolist()
    for adapter, (start, end) in enumerate(pairwise(starts)):
        tokens = runs.order[start:end].long()
        shrunk = (x[tokens].float() @ a[adapter].float().T).to(x.dtype).float()
        out[tokens] = scale[adapter] * (shrunk @ b[adapter].float().T)
    return out


def to_classic(k_cache: torch.Tensor, v_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a cache [N, S, G, D] in the layout of `paged_attention_classic`."""
    N, S, G, D = k_cache.shape
    x = 16 // k_cache.element_size()
    k = k_cache.view(N, S, G, D // x, x).permute(0, 2, 3, 1, 4).contiguous()
    return k, v_cache.permute(0, 2, 3, 1).contiguous()
