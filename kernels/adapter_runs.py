"""Which tokens of a step have which adapter."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class AdapterRuns:
    """The tokens of a step, sorted by adapter. The same for all layers."""

    order: torch.Tensor
    """[T] int32. Places of tokens; first those without an adapter, then adapter by adapter."""

    starts: torch.Tensor
    """[L + 1] int32. Where each adapter's tokens start in `order`, and the end."""


def adapter_runs(token_adapters: torch.Tensor, num_adapters: int) -> AdapterRuns:
    """Sort tokens by adapter, without waiting for the device.

    Shapes: token_adapters [T] int32, from -1 (none) to num_adapters - 1.
    """
    order = torch.argsort(token_adapters, stable=True)
    bounds = torch.arange(num_adapters + 1, device=token_adapters.device, dtype=torch.int32)
    starts = torch.searchsorted(token_adapters[order].contiguous(), bounds)
    return AdapterRuns(order.int(), starts.int())
