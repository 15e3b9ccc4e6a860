"""Whole sequences in a cache of their own, side by side, without rows, plans and sampling."""

from collections.abc import Sequence
from typing import Final

import torch

from kernels.checks import Scales
from worker_svc.model.llama import Llama
from worker_svc.runtime.kv_cache import KVCache
from worker_svc.runtime.memory_budget import blocks_for

_BLOCK_SIZE: Final = 16


class PlainSequences:
    """Sequences that grow by any number of tokens at a time: for calibration and measurements."""

    __slots__ = ("_lengths", "_model", "_tables", "cache")

    def __init__(
        self,
        model: Llama,
        capacities: Sequence[int],
        dtype: torch.dtype,
        scales: Sequence[Scales] | None = None,
    ) -> None:
        """Make room for so many tokens of each sequence, stored in `dtype`."""
        widths = [blocks_for(capacity, _BLOCK_SIZE) for capacity in capacities]
        self.cache = KVCache(model.config, sum(widths), _BLOCK_SIZE, dtype, model.device, scales)
        self._tables = torch.zeros((len(widths), max(widths)), dtype=torch.int32)
        first = 1
        for table, width in zip(self._tables, widths, strict=True):
            table[:width] = torch.arange(first, first + width)
            first += width
        self._lengths = [0] * len(widths)
        self._model = model

    def run(self, tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        """Append tokens, at least one to each sequence; return their hidden states [T, E]."""
        device = self._model.device
        starts = self._lengths
        ends = [start + len(new) for start, new in zip(starts, tokens, strict=True)]
        places = [torch.arange(start, end) for start, end in zip(starts, ends, strict=True)]
        slots = [
            table[place // _BLOCK_SIZE].long() * _BLOCK_SIZE + place % _BLOCK_SIZE
            for table, place in zip(self._tables, places, strict=True)
        ]
        counts = torch.tensor([0, *(len(new) for new in tokens)])
        self._lengths = ends
        return self._model.forward(
            token_ids=torch.tensor([token for new in tokens for token in new], device=device),
            positions=torch.cat(places).to(device),
            kv_caches=self.cache.layers,
            slot_mapping=torch.cat(slots).to(device),
            block_tables=self._tables.to(device),
            seq_lens=torch.tensor(ends, dtype=torch.int32, device=device),
            query_start_loc=counts.cumsum(0).to(torch.int32).to(device),
        )
