"""The rows of an embedding table that tokens name, on a CPU."""

import ctypes
from typing import Final

import torch
from torch.nn import functional

from kernels.checks import check_contiguous
from kernels.cpu_build import native_code


class _Embedding(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("table", "token_ids", "out")),
        *((name, ctypes.c_int64) for name in ("V", "T", "row_bytes")),
    )


# Of a kind that keeps the interpreter's lock, and so does whoever takes no memory from torch: see
# kernels/cpu_decoder.py.
_PROTOTYPE: Final = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


class CpuEmbedding:
    """Copies rows of a table, which it keeps."""

    __slots__ = ("_address", "_arguments", "_call", "_out", "_table")

    def __init__(self, table: torch.Tensor, code: ctypes.CDLL | None = None) -> None:
        """Take a table [V, E]. Raises: ValueError if it is not contiguous on a CPU."""
        if table.dim() != 2 or table.device.type != "cpu":
            raise ValueError(f"table is {list(table.shape)} on {table.device}, must be [V, E]")
        check_contiguous(table=table)
        self._table = table
        code = code or native_code()
        self._call = None if code is None else _PROTOTYPE(("pagemill_embed", code))
        V, E = table.shape
        self._arguments = _Embedding(table=table.data_ptr(), V=V, row_bytes=E * table.itemsize)
        self._address = ctypes.addressof(self._arguments)
        self._out = table.new_empty((0, E))

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return each token's row, until the next call overwrites them.

        Shapes: token_ids [T] int64, contiguous; returns [T, E].

        Raises: ValueError if `token_ids` is not so; IndexError if a token has no row.
        """
        if token_ids.dim() != 1 or token_ids.dtype != torch.int64:
            raise ValueError(f"token_ids is {list(token_ids.shape)} {token_ids.dtype}, must be [T]")
        if self._call is None:
            return functional.embedding(token_ids, self._table)
        check_contiguous(token_ids=token_ids)
        T, arguments = len(token_ids), self._arguments
        if len(self._out) != T:
            self._out = self._table.new_empty((T, self._table.shape[1]))
            arguments.out, arguments.T = self._out.data_ptr(), T
        arguments.token_ids = token_ids.data_ptr()
        if self._call(self._address):
            raise IndexError(f"a token id is not in 0 to {len(self._table) - 1}")
        return self._out
