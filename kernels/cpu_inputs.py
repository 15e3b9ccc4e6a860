"""A step's inputs written by native code, from columns that stay where they are."""

import ctypes
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

_COLUMNS: Final = ("tokens", "num_tokens", "num_computed_tokens", "num_new_tokens", "pooling")


class _StepInputs(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            *_COLUMNS, "block_tables", "running", "token_ids", "positions", "slot_mappings",
            "running_tables", "seq_lens", "query_start_loc", "last_tokens", "sampling_rows",
        )),
        *((name, ctypes.c_int64) for name in (
            "max_tokens", "max_blocks", "block_size", "num_groups", "R", "T", "S", "width",
        )),
    )  # fmt: skip


# Of a kind that keeps the interpreter's lock: a thread that waits for it would have it for longer
# than a call takes.
_PROTOTYPE: Final = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)


class RowColumns(NamedTuple):
    """What is known of N rows. Whoever owns the columns changes them in place."""

    tokens: npt.NDArray[np.int32]
    """[N, L]. Known tokens, and room for more."""

    num_tokens: npt.NDArray[np.int32]
    """[N]. How many are known."""

    num_computed_tokens: npt.NDArray[np.int32]
    """[N]. How many have keys and values."""

    num_new_tokens: npt.NDArray[np.int32]
    """[N]. How many the step computes behind these."""

    pooling: npt.NDArray[np.int64]
    """[N]. Not 0: the row samples no token."""

    block_tables: tuple[npt.NDArray[np.int32], ...]
    """Per KV group, [N, B]."""


class InputTensors(NamedTuple):
    """The inputs of a step: R rows, T tokens, of which S rows sample."""

    token_ids: torch.Tensor
    """[T] int64. Tokens go row after row."""

    positions: torch.Tensor
    """[T] int64"""

    slot_mappings: tuple[torch.Tensor, ...]
    """Per KV group, [T] int64."""

    block_tables: tuple[torch.Tensor, ...]
    """Per KV group, [R, B] int32; B is what the longest row needs."""

    seq_lens: torch.Tensor
    """[R] int32"""

    query_start_loc: torch.Tensor
    """[R + 1] int32"""

    last_tokens: torch.Tensor
    """[S] int64. Place in the step of each sampling row's last token."""

    sampling_rows: npt.NDArray[np.int64]
    """[S] Rows whose known tokens all have keys and values behind this step."""


class CpuInputs:
    """Writes the inputs of one step after another, as long as they are alike into the same memory.

    Cost: two calls, where numpy takes some thirty, each through code that a step's weights have
    driven out of the caches: 0.42 ms of a step of one row (SmolLM2-135M, Zen 4).
    """

    __slots__ = ("_address", "_arguments", "_columns", "_measure", "_places", "_running", "_sizes",
                 "_tensors", "_write")  # fmt: skip

    def __init__(self, columns: RowColumns, block_size: int, code: ctypes.CDLL) -> None:
        """Take columns that stay where they are.

        Raises: ValueError if a column is not contiguous, or not of its type or shape.
        """
        _check(columns)
        self._measure = _PROTOTYPE(("pagemill_measure_inputs", code))
        self._write = _PROTOTYPE(("pagemill_write_inputs", code))
        self._columns = columns
        self._running = np.zeros(len(columns.num_tokens), dtype=np.int64)
        tables = columns.block_tables
        addresses = (ctypes.c_void_p * len(tables))(*(table.ctypes.data for table in tables))
        self._places: tuple[object, ...] = (addresses,)
        self._arguments = _StepInputs(
            *(getattr(columns, name).ctypes.data for name in _COLUMNS),
            block_tables=ctypes.addressof(addresses),
            running=self._running.ctypes.data,
            max_tokens=columns.tokens.shape[1],
            max_blocks=tables[0].shape[1],
            block_size=block_size,
            num_groups=len(tables),
        )
        self._address = ctypes.addressof(self._arguments)
        self._sizes = (0, 0, 0, 0)
        self._tensors = self._lay_out(*self._sizes)

    def write(self, running: npt.NDArray[np.int64]) -> InputTensors:
        """Return the inputs for running these rows, which hold until the next call.

        Shape: running [R], ascending. Rows have the tokens and the blocks that they need.
        """
        arguments, R = self._arguments, len(running)
        self._running[:R] = running
        arguments.R = R
        self._measure(self._address)
        sizes = (R, arguments.T, arguments.S, arguments.width)
        if sizes != self._sizes:
            self._sizes, self._tensors = sizes, self._lay_out(*sizes)
        self._write(self._address)
        return self._tensors

    def _lay_out(self, R: int, T: int, S: int, width: int) -> InputTensors:
        """Return new tensors of these sizes, where the next inputs will be written."""

        def wide(count: int) -> torch.Tensor:
            return torch.empty(count, dtype=torch.int64)

        groups = range(len(self._columns.block_tables))
        tensors = InputTensors(
            token_ids=wide(T),
            positions=wide(T),
            slot_mappings=tuple(wide(T) for _ in groups),
            block_tables=tuple(torch.empty((R, width), dtype=torch.int32) for _ in groups),
            seq_lens=torch.empty(R, dtype=torch.int32),
            query_start_loc=torch.empty(R + 1, dtype=torch.int32),
            last_tokens=wide(S),
            sampling_rows=np.empty(S, dtype=np.int64),
        )
        arguments = self._arguments
        for name in ("token_ids", "positions", "seq_lens", "query_start_loc", "last_tokens"):
            setattr(arguments, name, getattr(tensors, name).data_ptr())
        arguments.sampling_rows = tensors.sampling_rows.ctypes.data
        slots, tables = _addresses(tensors.slot_mappings), _addresses(tensors.block_tables)
        arguments.slot_mappings = ctypes.addressof(slots)
        arguments.running_tables = ctypes.addressof(tables)
        self._places = (self._places[0], slots, tables)
        return tensors


def _addresses(tensors: Sequence[torch.Tensor]) -> "ctypes.Array[ctypes.c_void_p]":
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def _check(columns: RowColumns) -> None:
    N, L = columns.tokens.shape
    shapes = dict.fromkeys(_COLUMNS, (N,)) | {"tokens": (N, L)}
    table_shape = columns.block_tables[0].shape
    wanted = [(name, getattr(columns, name), shapes[name]) for name in _COLUMNS]
    wanted += [("block_tables", table, (N, table_shape[1])) for table in columns.block_tables]
    for name, column, shape in wanted:
        dtype = np.dtype(np.int64 if name == "pooling" else np.int32)
        if column.shape != shape or column.dtype != dtype or not column.flags.c_contiguous:
            raise ValueError(
                f"{name} is {list(column.shape)} {column.dtype}, must be {list(shape)} {dtype}, "
                f"contiguous"
            )
