"""What a device knows of the rows, kept there from step to step: tokens, blocks, sampling."""

import numpy as np
import torch

from worker_svc.runtime.rows import Rows
from worker_svc.runtime.step_plan import Float32Array, Int32Array, Int64Array, StepPlan

_SAMPLING_COLUMNS = 7


class DeviceRows:
    """A copy of `Rows` on the device, brought up to date by what a plan changed.

    The device's copy is the only one that has sampled tokens: they are written there as they are
    drawn, and never wait for the host. The last row is no request's: it pads batches.

    Shapes: R rows, and one more.
        tokens    [R + 1, L]  int32
        tables    per KV group, [R + 1, B]  int32, as `BlockTables.ids`
        sampling  [R + 1, 7]  int32: temperature, top_p and min_p as fp32 bits; top_k; the
            seed's lower and upper half; the sequence index
    """

    __slots__ = ("_blocks_there", "_device", "_rows", "sampling", "tables", "tokens")

    def __init__(self, rows: Rows, device: torch.device) -> None:
        """Make a copy of rows of which none is known yet."""
        num_rows, max_tokens = rows.tokens.shape
        self._rows = rows
        self._device = device
        # Of each group's tables, how many leading entries of a row the device has.
        self._blocks_there = [np.zeros(num_rows, dtype=np.int32) for _ in rows.block_tables]
        self.tokens = torch.zeros((num_rows + 1, max_tokens), dtype=torch.int32, device=device)
        self.tables = tuple(
            torch.zeros((num_rows + 1, tables.ids.shape[1]), dtype=torch.int32, device=device)
            for tables in rows.block_tables
        )
        self.sampling = torch.zeros(
            (num_rows + 1, _SAMPLING_COLUMNS), dtype=torch.int32, device=device
        )

    @property
    def padding(self) -> int:
        """The row that is no request's."""
        return len(self.tokens) - 1

    def follow(self, plan: StepPlan) -> None:
        """Copy what the plan changed. The rows have applied it already."""
        forked = np.array([fork.row for fork in plan.forked], dtype=np.int64)
        admitted = np.array([entry.row for entry in plan.admitted], dtype=np.int64)
        replaced = np.concatenate((forked, admitted))
        if len(forked):
            self._fork(plan)
        if len(admitted):
            self._admit(plan, admitted)
        if len(replaced):
            self.sampling[self._place(replaced)] = self._place(self._sampling_of(replaced))
        for group in range(len(self.tables)):
            gaining = [replaced]
            if group < len(plan.appended):
                gaining.append(plan.appended[group].rows.astype(np.int64))
            self._copy_blocks(group, np.unique(np.concatenate(gaining)), replaced)

    def _fork(self, plan: StepPlan) -> None:
        """Copy tokens from parents, on the device: the host may not know the last ones yet."""
        moved = [fork for fork in plan.forked if fork.row != fork.parent_row]
        if moved:
            rows = np.array([fork.row for fork in moved], dtype=np.int64)
            parents = np.array([fork.parent_row for fork in moved], dtype=np.int64)
            # Indexing copies, so that every parent is read before any row is written.
            self.tokens[self._place(rows)] = self.tokens[self._place(parents)]
        for fork in plan.forked:
            if fork.last_token is not None:
                known = self._rows.tokens[fork.row, self._last(fork.row)]
                self.tokens[fork.row, self._last(fork.row)] = int(known)

    def _last(self, row: int) -> int:
        """Return the place of a forked row's last token."""
        return int(self._rows.num_tokens[row]) - 1

    def _admit(self, plan: StepPlan, admitted: Int64Array) -> None:
        """Copy the admitted rows' tokens, in one transfer."""
        flat = self._place(
            np.concatenate(
                [self._rows.tokens[row, : len(entry.tokens)] for row, entry in
                 zip(admitted, plan.admitted, strict=True)]
            )
        )  # fmt: skip
        start = 0
        for entry in plan.admitted:
            end = start + len(entry.tokens)
            self.tokens[entry.row, : end - start] = flat[start:end]
            start = end

    def _copy_blocks(self, group: int, rows: Int64Array, replaced: Int64Array) -> None:
        """Copy the block ids the device has not: all of a replaced row's, else the last ones."""
        tables, there = self._rows.block_tables[group], self._blocks_there[group]
        there[replaced] = 0
        counts = tables.num_blocks[rows] - there[rows]
        if not counts.any():
            return
        row = np.repeat(rows, counts)
        first = np.repeat(there[rows] - (np.cumsum(counts) - counts), counts)
        column = first + np.arange(len(row))
        entries = np.stack((row, column, tables.ids[row, column])).astype(np.int64)
        placed = self._place(entries)
        self.tables[group][placed[0], placed[1]] = placed[2].int()
        there[rows] = tables.num_blocks[rows]

    def _sampling_of(self, rows: Int64Array) -> Int32Array:
        """Return the rows' sampling as in `sampling`. Shape: [rows, 7]."""
        columns = self._rows.sampling

        def bits(column: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> Int32Array:
            values: Float32Array = column[rows].astype(np.float32)
            return values.view(np.int32)

        seed = columns.seed[rows].view(np.int32).reshape(-1, 2)
        return np.stack(
            (
                bits(columns.temperature),
                bits(columns.top_p),
                bits(columns.min_p),
                columns.top_k[rows].astype(np.int32),
                seed[:, 0],
                seed[:, 1],
                columns.sequence_index[rows].astype(np.int32),
            ),
            axis=1,
        )

    def _place(self, column: np.ndarray[tuple[int, ...], np.dtype[np.integer]]) -> torch.Tensor:
        return to_device(column, self._device)


def to_device(
    column: np.ndarray[tuple[int, ...], np.dtype[np.integer]], device: torch.device
) -> torch.Tensor:
    """Return a copy of a column on the device; on a GPU, without waiting for what runs there."""
    if device.type == "cpu":
        return torch.from_numpy(column.copy())
    return torch.from_numpy(column).pin_memory().to(device, non_blocking=True)
