"""Decode steps in a few fixed sizes, so that a GPU replays each as one recorded graph."""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import torch

from worker_svc.runtime.device_rows import to_device
from worker_svc.runtime.step_plan import Int64Array

DecodeStep: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Runs one token of each row. Shapes: rows, places [R] int64, a place of -1 for padding; to [R]."""

# Runs of a step before it is recorded: libraries set themselves up in the first ones, which must
# not end up in the graph.
_WARM_UPS = 2


class DecodeBatches:
    """Runs a decode step on batches padded to the next of its sizes.

    Where graphs are recorded, a step is one launch, whatever the model's number of kernels; else
    the same padded step runs kernel by kernel.

    Source: CUDA graphs with padded batch sizes, as in vLLM and SGLang.
    """

    __slots__ = ("_columns", "_graphs", "_outputs", "_padding", "_sizes", "_step")

    def __init__(
        self, step: DecodeStep, max_rows: int, padding_row: int, device: torch.device
    ) -> None:
        """Take a step that allocates nothing of a size the host does not know."""
        self._step = step
        self._padding = padding_row
        self._sizes = batch_sizes(max_rows)
        # Rows, then places: one transfer fills both.
        self._columns = torch.empty((2, self._sizes[-1]), dtype=torch.int64, device=device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._outputs: dict[int, torch.Tensor] = {}

    def record(self) -> None:
        """Record a graph for each size. Needs a CUDA device with nothing else running on it.

        The largest comes first, so that the others find their memory in its pool.
        """
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self._sizes):
            self._columns[0].fill_(self._padding)
            self._columns[1].fill_(-1)
            rows, places = self._columns[0, :size], self._columns[1, :size]
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UPS):
                    self._step(rows, places)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._outputs[size] = self._step(rows, places)
            self._graphs[size] = graph

    def run(self, rows: Int64Array, places: Int64Array) -> torch.Tensor:
        """Run the token at `places[i]` of `rows[i]`. Returns what was sampled, on the device.

        Shapes: rows, places [R], at most as many as there are rows; returns [R] int32, valid
            until the next run.
        """
        size = self._sizes[int(np.searchsorted(self._sizes, len(rows)))]
        columns = np.empty((2, size), dtype=np.int64)
        columns[0, : len(rows)], columns[0, len(rows) :] = rows, self._padding
        columns[1, : len(rows)], columns[1, len(rows) :] = places, -1
        self._columns[:, :size].copy_(to_device(columns, self._columns.device), non_blocking=True)
        graph = self._graphs.get(size)
        if graph is None:
            sampled = self._step(self._columns[0, :size], self._columns[1, :size])
        else:
            graph.replay()
            sampled = self._outputs[size]
        return sampled[: len(rows)]


def batch_sizes(most: int) -> tuple[int, ...]:
    """Return the sizes that batches of up to `most` rows are padded to, ascending.

    From 8 on each doubling is cut into quarters: at most a fifth of a batch is padding, and 256
    rows take 24 sizes.
    """
    sizes = [size for size in (1, 2, 4, 8) if size < most]
    octave = 8
    while octave < most:
        sizes += range(octave * 5 // 4, octave * 2 + 1, octave // 4)
        octave *= 2
    return (*(size for size in sizes if size < most), most)
