"""Whole sequences in a cache of their own, side by side, without rows, plans and sampling."""

from collections.abc import Sequence
from typing import Final

import torch

from kernels import cache_layout
from kernels.checks import Scales
from worker_svc.errors import InvariantError
from worker_svc.model.causal_model import CausalModel
from worker_svc.runtime.kv_cache import KVCache
from worker_svc.runtime.memory_budget import blocks_for

_BLOCK_SIZE: Final = 16


class PlainSequences:
    """Sequences that grow by any number of tokens at a time: for calibration and measurements."""

    __slots__ = ("_lengths", "_model", "_tables", "cache")

    def __init__(
        self,
        model: CausalModel,
        capacities: Sequence[int],
        dtype: torch.dtype,
        scales: Sequence[Scales] | None = None,
    ) -> None:
        """Make room for so many tokens of each sequence, stored in `dtype`."""
        widths = [blocks_for(capacity, _BLOCK_SIZE) for capacity in capacities]
        num_groups, device = len(model.config.kv_groups), model.device
        num_blocks = num_groups * sum(widths)
        self.cache = KVCache(
            model.config, num_blocks, _BLOCK_SIZE, dtype, device, scales,
            in_lanes=model.keys_in_lanes,
        )  # fmt: skip
        shape = (num_groups, len(widths), max(widths))
        self._tables = torch.zeros(shape, dtype=torch.int32)
        first = 1
        for tables in self._tables:
            for table, width in zip(tables, widths, strict=True):
                table[:width] = torch.arange(first, first + width)
                first += width
        self._lengths = [0] * len(widths)
        self._model = model

    def stored(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of a layer: [blocks, S, G, D] each, of the stored dtype."""
        for group, tables in zip(self._model.config.kv_groups, self._tables, strict=True):
            if layer in group.layers:
                blocks = tables[tables > 0].long().to(self._model.device)
                cache = self.cache.layers[layer]
                return cache_layout.to_rows(cache.k[blocks], cache.v[blocks])
        raise InvariantError(f"layer {layer} is in no KV group")

    def run(self, tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        """Append tokens, at least one to each sequence; return their hidden states [T, E]."""
        device = self._model.device
        starts = self._lengths
        ends = [start + len(new) for start, new in zip(starts, tokens, strict=True)]
        places = [torch.arange(start, end) for start, end in zip(starts, ends, strict=True)]
        counts = torch.tensor([0, *(len(new) for new in tokens)])
        self._lengths = ends
        return self._model.forward(
            token_ids=torch.tensor([token for new in tokens for token in new], device=device),
            positions=torch.cat(places).to(device),
            kv_caches=self.cache.layers,
            slot_mappings=[_slots(tables, places).to(device) for tables in self._tables],
            block_tables=[tables.to(device) for tables in self._tables],
            seq_lens=torch.tensor(ends, dtype=torch.int32, device=device),
            query_start_loc=counts.cumsum(0).to(torch.int32).to(device),
        ).hidden.clone()


def _slots(tables: torch.Tensor, places: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return where the tokens at some places of each sequence lie. Shapes: tables [R, B]."""
    return torch.cat(
        [
            table[place // _BLOCK_SIZE].long() * _BLOCK_SIZE + place % _BLOCK_SIZE
            for table, place in zip(tables, places, strict=True)
        ]
    )
